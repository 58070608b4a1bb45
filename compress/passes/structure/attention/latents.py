"""What is seen of the attention of a block before its keys and values become one latent."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.arch.forward.forward import describe_forward
from compress.blocks.capture import calls
from compress.blocks.walk import BlockInput, LoadedBlock
from compress.edits.latent.evidence import AttentionEvidence
from compress.edits.turned import Turned
from compress.formats import Weights
from compress.passes.ranks import Ranks, summed_count
from compress.passes.structure.attention.reading import value_metrics
from compress.passes.structure.attention.shares import frequencies, shares, turns_at
from compress.passes.structure.attention.turned import turned_of

PARTS = ("q", "k", "v")
# Positions of a text whose attention is looked at, at most, in equal steps: of a text of 4,096
# tokens all of them take half a second and 440 MB a head.
QUERIES = 256


def look_at_attention(
    block: LoadedBlock, weights: Weights, ranks: Ranks, *, evenly: bool = False
) -> AttentionEvidence:
    """What the heads of a block ask for and are made of, over all rows of its chain. evenly: tokens
    count alike, however much heads attend to them."""
    sizes, device = block.spec.sizes, block.skeleton.device
    made = _Sums.empty(block, turned_of(weights, block.spec.index), device)
    attended = _Attended.of(block, weights, made.turned)
    modules = {x.role: x.module for x in block.spec.linears if x.role in PARTS}
    for entering in block.inputs():
        with torch.no_grad(), calls(block.module, list(modules.values())) as seen:
            block.run(entering)
        q, k, v = (seen[modules[part]][1] for part in PARTS)
        for row in _rows(entering, len(q)):
            heads = (torch.unflatten(x[row], -1, (-1, sizes.key_width)) for x in (q, k))
            share = attended.add(*heads)
            made.add(q[row], k[row], v[row], torch.ones_like(share) if evenly else share)
    return made.over(ranks, attended, value_metrics(block))


def _rows(entering: BlockInput, count: int) -> Iterator[tuple[int, Tensor | slice]]:
    """Indices of the tokens of each text of a batch, without padding."""
    for row in range(count):
        yield row, slice(None) if entering.mask is None else entering.mask[row]


@dataclass(slots=True, eq=False)
class _Sums:
    """Sums of what `AttentionEvidence` has means of."""

    turned: Turned
    states: Tensor
    queries: Tensor
    tokens: int = 0

    @classmethod
    def empty(cls, block: LoadedBlock, turned: Turned, device: str) -> "_Sums":
        sizes = block.spec.sizes
        width = sizes.of("k") + sizes.of("v")
        states = torch.zeros(width, width, dtype=torch.float64, device=device)
        queries = states.new_zeros(sizes.heads, sizes.key_width, sizes.key_width)
        return cls(turned, states, queries)

    def add(self, q: Tensor, k: Tensor, v: Tensor, share: Tensor) -> None:
        """q: [T, H * D], k: [T, G * D], v: [T, G * V]. share: fp64 [T], of attention."""
        x = torch.cat([k, v], dim=-1).float()
        self.states += (x * share.float()[:, None]).T @ x
        q = torch.unflatten(q.float(), -1, (len(self.queries), -1))
        self.queries += torch.einsum("thi,thj->hij", q, q)
        self.tokens += len(x)

    def over(self, ranks: Ranks, attended: "_Attended", outputs: Tensor) -> AttentionEvidence:
        tokens = summed_count(ranks, self.tokens)
        rows = summed_count(ranks, attended.rows)
        turns = torch.view_as_complex(ranks.sum(torch.view_as_real(attended.turns)))
        return AttentionEvidence(
            self.turned,
            ranks.sum(self.states).div_(tokens),  # as large as a block
            ranks.sum(self.queries) / tokens,
            turns / rows,
            outputs,
        )


@dataclass(slots=True, eq=False)
class _Attended:
    """The mean of e^(iθ(t - s)) over what each head attends to, summed over rows.

    angles: fp64 [F], of one position. scale: of scores. turns: complex [H, F].
    """

    turned: Turned
    angles: Tensor
    scale: float
    turns: Tensor
    rows: int = 0

    @classmethod
    def of(cls, block: LoadedBlock, weights: Weights, turned: Turned) -> "_Attended":
        kind = describe_forward(weights.checkpoint.config, weights.spec).grouped(block.spec.index)
        rope, device = kind.rope, block.skeleton.device
        assert rope is not None, "refused in the plan"
        turns = torch.zeros(kind.heads, rope.dim // 2, dtype=torch.complex128, device=device)
        return cls(turned, frequencies(rope).to(device), kind.turned_scale, turns)

    def add(self, q: Tensor, k: Tensor) -> Tensor:
        """A text; how much heads attend to each token of it, in their mean: fp64 [T], of mean 1.

        q: [T, H, D], k: [T, G, D].
        """
        positions = torch.arange(len(q), device=q.device)
        turn = turns_at(positions, self.angles)
        at = positions[:: -(-len(q) // QUERIES)]
        later = positions > at[:, None]
        asked, given = (self.turned.numbers(x) * turn[:, None] for x in (q, k))
        asked = asked[at]
        group, share = asked.shape[1] // given.shape[1], turn.real.new_zeros(len(q))
        for head in range(asked.shape[1]):
            seen = shares(asked[:, head], given[:, head // group], later, self.scale).double()
            back = torch.complex(seen @ turn.real, -(seen @ turn.imag))  # of e^(-iθs)
            self.turns[head] += (turn[at] * back).mean(dim=0)
            share += seen.sum(dim=0) / asked.shape[1]
        self.rows += 1
        return share * (len(q) / len(at))
