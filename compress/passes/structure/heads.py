"""Heads that come to share keys and values: what is seen of them, and what becomes of q, k, v, o.

All heads stay in the edited block until it is cut, those of a group with the same keys and values:
so it computes what the result will, and its outputs are looked at and refitted like any other's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.arch.forward.forward import describe_forward
from compress.arch.resize.cut import Kept
from compress.arch.sizes import BlockSizes
from compress.arch.spec import LinearSpec
from compress.blocks.capture import calls
from compress.blocks.linear import linear_weight
from compress.blocks.walk import LoadedBlock
from compress.edits.learned import HeadChoice, LinearChange, Site
from compress.edits.pool.evidence import (
    HeadEvidence,
    SharedHead,
    key_energy,
    lost_keys,
    lost_values,
    value_energy,
)
from compress.edits.repair.ridge import Affine
from compress.formats import Weights
from compress.passes.ranks import Ranks
from compress.passes.structure.observe import Pair, affine_of
from compress.report.schema import LinearRepair

PARTS = ("q", "k", "v")


@dataclass(frozen=True, slots=True, eq=False)
class Turned:
    """Which numbers of a head are turned against each other, as complex ones: int64 [F] each."""

    real: Tensor
    imaginary: Tensor

    def numbers(self, x: Tensor) -> Tensor:
        """[..., D] as complex [..., F], in fp64."""
        x = x.double()
        return torch.complex(x[..., self.real], x[..., self.imaginary])

    def rows(self, z: Tensor) -> Tensor:
        """Complex [..., F] as [..., D]."""
        made = z.real.new_empty(*z.shape[:-1], 2 * z.shape[-1])
        made[..., self.real], made[..., self.imaginary] = z.real, z.imag
        return made


def turned_of(weights: Weights, layer: int) -> Turned:
    """Of the heads of keys of a layer; numbers that are not rotated are taken by halves too."""
    kind = describe_forward(weights.checkpoint.config, weights.spec).grouped(layer)
    assert kind.qkv == "parts", "rows of q, k and v lie head by head"
    rotated = 0 if kind.rope is None else kind.rope.dim + kind.rope.dim % 2
    numbers = torch.arange(kind.key_width)
    halves = [x.view(2, -1) for x in (numbers[:rotated], numbers[rotated:])]
    return Turned(*(torch.cat([x[i] for x in halves]) for i in (0, 1)))


def look_at_heads(pair: Pair, site: Site, turned: Turned, ranks: Ranks) -> HeadEvidence:
    """What the heads of the edited block read and write, over all rows."""
    block, sizes = pair.edited, pair.edited.spec.sizes
    heads, width, group = sizes.kv_heads, sizes.value_width, sizes.heads // sizes.kv_heads
    device, frequencies = block.skeleton.device, len(turned.real)
    keys = torch.zeros(frequencies, heads, heads, dtype=torch.complex128, device=device)
    queries = torch.zeros(heads, frequencies, dtype=torch.float64, device=device)
    values = queries.new_zeros(heads * width, heads * width)
    linears = [x for x in site.linears if x.role != "o"]
    for entering in block.inputs():
        with torch.no_grad(), calls(block.module, [x.module for x in linears]) as seen:
            block.run(entering)
        real = slice(None) if entering.mask is None else entering.mask.to(device)
        gave = {x.role: seen[x.module][1][real].flatten(0, -2) for x in linears}
        q, k, v = (_parts(gave, sizes)[part] for part in PARTS)
        z = turned.numbers(torch.unflatten(k, 1, (heads, -1))).permute(2, 1, 0)  # [F, H, tokens]
        keys += z @ z.mH
        energy = turned.numbers(torch.unflatten(q, 1, (heads, group, -1))).abs().square()
        queries += energy.sum(dim=(0, 2))
        values += v.double().T @ v.double()
    whole = torch.view_as_complex(ranks.sum(torch.view_as_real(keys)))
    outputs = _outputs(block, next(x for x in site.linears if x.role == "o"))
    return HeadEvidence(whole, ranks.sum(queries), ranks.sum(values), outputs)


def _outputs(block: LoadedBlock, linear: LinearSpec) -> Tensor:
    """Sum of Wᵀ W over the query heads that read a head of values: fp64 [H, D, D]."""
    sizes = block.spec.sizes
    weight = linear_weight(block.module, linear).double()
    heads = torch.unflatten(weight, 1, (sizes.kv_heads, -1, sizes.value_width))  # [hidden, H, g, D]
    return torch.einsum("nhgi,nhgj->hij", heads, heads)


def _parts(whole: Mapping[str, Tensor], sizes: BlockSizes) -> dict[str, Tensor]:
    """Queries, keys and values along the last dimension, or the first of weights, of which one
    linear may give all."""
    if "qkv" not in whole:
        return {part: whole[part] for part in PARTS}
    widths = [sizes.of(part) for part in PARTS]
    return dict(zip(PARTS, torch.split(whole["qkv"], widths, dim=-1), strict=True))


def shared_heads(seen: HeadEvidence, choice: HeadChoice) -> list[SharedHead]:
    """The heads that stay, each of the heads that it stands for."""
    return [choice.pool(seen, members) for members in choice.groups(seen, choice.keep)]


@dataclass(frozen=True, slots=True, eq=False)
class Pooling:
    """What makes linears with shared heads of those that there are. sizes: of the block."""

    shared: Sequence[SharedHead]
    turned: Turned
    sizes: BlockSizes

    def linear(self, linear: LinearSpec, now: Affine) -> Affine:
        """What a linear of attention becomes: of all heads, those of a group alike."""
        joined = _joined(now)
        if linear.role == "o":
            made = self._reading(joined)
        elif linear.role == "qkv":
            widths = [self.sizes.of(part) for part in PARTS]
            made = torch.cat(
                [self._rows(*x) for x in zip(PARTS, torch.split(joined, widths), strict=True)]
            )
        else:
            made = self._rows(linear.role, joined)
        return _apart(made, linear.shape[1])

    def _rows(self, part: str, rows: Tensor) -> Tensor:
        """Queries, keys or values: [heads * width, in]."""
        heads = torch.unflatten(rows, 0, (self.sizes.kv_heads, -1))
        if part == "v":
            for each in self.shared:
                index = torch.tensor(each.members)
                heads[index] = each.value_in @ heads[index].flatten(0, 1)
            return rows
        numbers = self.turned.numbers(torch.unflatten(heads, 1, (-1, self.sizes.key_width)).mT)
        for each in self.shared:
            index = torch.tensor(each.members)
            here = numbers[index]  # [m, heads that read it or 1, in, F]
            if part == "q":
                numbers[index] = here * each.key_out.conj()[:, None, None]
            else:
                numbers[index] = (here * each.key_in[:, None, None]).sum(dim=0)
        return self.turned.rows(numbers).mT.reshape(rows.shape)

    def _reading(self, joined: Tensor) -> Tensor:
        """What reads the values: [hidden, heads * width], and the bias behind it."""
        sizes = self.sizes
        heads = joined[:, : sizes.of("attended")]
        heads = torch.unflatten(heads, 1, (sizes.kv_heads, -1, sizes.value_width))
        for each in self.shared:
            index = torch.tensor(each.members)
            heads[:, index] = torch.einsum("nhgi,hij->nhgj", heads[:, index], each.value_out)
        return joined


def _joined(linear: Affine) -> Tensor:
    """The weight with its bias as one more column, in fp64."""
    bias = [] if linear.bias is None else [linear.bias[:, None]]
    return torch.cat([linear.weight, *bias], dim=1).double()


def _apart(joined: Tensor, inputs: int) -> Affine:
    weight, bias = joined[:, :inputs].float(), joined[:, inputs:].float()
    return Affine(weight, bias.flatten() if bias.numel() else None)


def pooled_changes(
    block: LoadedBlock, site: Site, seen: HeadEvidence, pooling: Pooling
) -> Iterator[LinearChange]:
    """What becomes of each linear of attention; the first says which heads share."""
    shared, sizes = pooling.shared, pooling.sizes
    of_keys = sum(lost_keys(seen, x) for x in shared) / (key_energy(seen) or 1.0)
    of_values = sum(lost_values(seen, x) for x in shared) / (value_energy(seen) or 1.0)
    groups = ", ".join(" ".join(map(str, each.members)) for each in shared)
    together = f"heads that share: {groups}"
    said = {
        "k": (of_keys, together),
        "v": (of_values, together),
        "qkv": (of_keys, f"{together}; of values {100 * of_values:.2g} %"),
    }
    kept = all_kept(shared, sizes.heads // sizes.kv_heads)
    for x in site.linears:
        fact = None
        if x.role in said:
            lost, note = said[x.role]
            fact = LinearRepair(x.name, len(shared), seen.heads, before=lost, note=note)
        yield LinearChange(x, pooling.linear(x, affine_of(block, x)), kept, fact)
        kept = Kept()


def all_kept(shared: Sequence[SharedHead], group: int) -> Kept:
    """All query heads, those that share behind one another, and the first head of each group, which
    is like the others. group: query heads that read a head."""
    members = torch.tensor([head for each in shared for head in each.members])
    heads = (members[:, None] * group + torch.arange(group)).flatten()
    return Kept(heads=heads, kv_heads=torch.tensor([each.members[0] for each in shared]))
