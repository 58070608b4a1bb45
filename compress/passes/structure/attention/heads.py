"""Heads that come to share keys and values: what is seen of them, and what becomes of q, k, v, o.

All heads stay in the edited block until it is cut, those of a group with the same keys and values:
so it computes what the result will, and its outputs are looked at and refitted like any other's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.arch.resize.cut import Kept
from compress.arch.sizes import BlockSizes
from compress.arch.spec import LinearSpec
from compress.blocks.capture import calls
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
from compress.edits.turned import Turned
from compress.passes.ranks import Ranks, decided
from compress.passes.structure.attention.normed_keys import (
    FittedKeys,
    HeadNorms,
    KeyFit,
    fitted_keys,
    head_norms,
    mean_keys,
)
from compress.passes.structure.attention.reading import value_metrics
from compress.passes.structure.attention.turned import turned_of
from compress.passes.structure.observe import Pair, affine_of
from compress.passes.structure.tokens import ReadsModel
from compress.report.schema import LinearRepair

PARTS = ("q", "k", "v")


def pooled(work: ReadsModel, pair: Pair, site: Site) -> Iterator[LinearChange]:
    """What becomes of each linear of attention when heads share keys and values."""
    choice, block, ranks = site.heads, pair.edited, work.ranks
    assert choice is not None, "no heads are to share"
    turned = turned_of(work.weights, block.spec.index)
    norms = head_norms(work.weights, block.spec, block.skeleton.device)
    seen = look_at_heads(pair, site, turned, norms, ranks)
    shared = decided(ranks, partial(shared_heads, seen, choice))
    fitted = None
    if norms is not None and choice.way.keys != "one" and len(shared) < seen.heads:
        linear = next(x for x in site.linears if x.role == "k")
        keys = KeyFit(pair, linear, norms.k, turned, seen, ranks)
        fitted = (fitted_keys if choice.way.keys == "fit" else mean_keys)(keys, shared)
    yield from pooled_changes(block, site, seen, Pooling(shared, turned, block.spec.sizes, fitted))


def look_at_heads(
    pair: Pair, site: Site, turned: Turned, norms: HeadNorms | None, ranks: Ranks
) -> HeadEvidence:
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
        q, k = torch.unflatten(q, 1, (heads, group, -1)), torch.unflatten(k, 1, (heads, -1))
        if norms is not None:
            q, k = norms.q.normed(q), norms.k.normed(k)
        z = turned.numbers(k).permute(2, 1, 0)  # [F, H, tokens]
        keys += z @ z.mH
        energy = turned.numbers(q).abs().square()
        queries += energy.sum(dim=(0, 2))
        values += v.double().T @ v.double()
    whole = torch.view_as_complex(ranks.sum(torch.view_as_real(keys)))
    summed = whole, ranks.sum(queries), ranks.sum(values)
    return HeadEvidence(*summed, value_metrics(block), normed=norms is not None)


def _parts(whole: Mapping[str, Tensor], sizes: BlockSizes) -> dict[str, Tensor]:
    """Queries, keys and values along the last dimension, or the first of weights, of which one
    linear may give all."""
    if "qkv" not in whole:
        return {part: whole[part] for part in PARTS}
    widths = [sizes.of(part) for part in PARTS]
    return dict(zip(PARTS, torch.split(whole["qkv"], widths, dim=-1), strict=True))


def shared_heads(seen: HeadEvidence, choice: HeadChoice) -> list[SharedHead]:
    """The heads that stay, each of the heads that it stands for."""
    pool = choice.way.of(seen)
    return [pool(seen, members) for members in choice.groups(seen, choice.keep)]


@dataclass(frozen=True, slots=True, eq=False)
class Pooling:
    """What makes linears with shared heads of those that there are. sizes: of the block. keys: as
    they were fitted, behind a norm."""

    shared: Sequence[SharedHead]
    turned: Turned
    sizes: BlockSizes
    keys: FittedKeys | None = None

    def linear(self, linear: LinearSpec, now: Affine) -> Affine:
        """What a linear of attention becomes: of all heads, those of a group alike."""
        if linear.role == "k" and self.keys is not None:
            return self.keys.linear
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
    fitted = pooling.keys
    of_keys = sum(lost_keys(seen, x) for x in shared) / (key_energy(seen) or 1.0)
    of_keys = of_keys if fitted is None else fitted.lost
    of_values = sum(lost_values(seen, x) for x in shared) / (value_energy(seen) or 1.0)
    groups = ", ".join(" ".join(map(str, each.members)) for each in shared)
    together = f"heads that share: {groups}"
    if fitted is not None and fitted.instead:
        together += "; the mean of what makes their keys, which loses less than a fit"
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
        beside = fitted.beside if fitted is not None and x.role == "k" else {}
        yield LinearChange(x, pooling.linear(x, affine_of(block, x)), kept, fact, beside)
        kept = Kept()


def all_kept(shared: Sequence[SharedHead], group: int) -> Kept:
    """All query heads, those that share behind one another, and the first head of each group, which
    is like the others. group: query heads that read a head."""
    members = torch.tensor([head for each in shared for head in each.members])
    heads = (members[:, None] * group + torch.arange(group)).flatten()
    return Kept(heads=heads, kv_heads=torch.tensor([each.members[0] for each in shared]))
