"""Texts as heads that read a latent see them, and what those of the source attend to there."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.arch.forward.forward import describe_forward
from compress.arch.forward.kinds import Latent
from compress.arch.forward.table import Norms
from compress.arch.spec import LinearSpec
from compress.blocks.capture import collect
from compress.blocks.walk import BlockInput, LoadedBlock, TokenBatch
from compress.edits.latent.queries import AskingText, Looked, as_complex
from compress.formats import Weights
from compress.passes.ranks import Ranks, summed_count
from compress.passes.structure.attention.shares import frequencies, shares, turns_at
from compress.passes.structure.attention.turned import turned_of
from compress.passes.structure.observe import Pair


@dataclass(frozen=True, slots=True, eq=False)
class AttendingBlock:
    """A block whose attention is the measure. own: on its own states, else on those of the edited
    chain. angles: fp64 [F]. scale: of scores."""

    block: LoadedBlock
    weights: Weights
    own: bool
    angles: Tensor
    scale: float

    @classmethod
    def of(cls, block: LoadedBlock, weights: Weights, *, own: bool) -> "AttendingBlock":
        kind = describe_forward(weights.checkpoint.config, weights.spec).grouped(block.spec.index)
        assert kind.rope is not None, "refused in the plan"
        angles = frequencies(kind.rope).to(block.skeleton.device)
        return cls(block, weights, own, angles, kind.turned_scale)

    def read(self, entering: BlockInput) -> Tensor:
        """What its attention reads: [rows, length, hidden]."""
        entering = self.block.input(entering.index) if self.own else entering
        return attention_input(self.block, self._linear("q"), entering)

    def attended(self, x: Tensor, asking: Tensor, later: Tensor) -> Tensor:
        """The attention of some tokens of a text: [H, t, T]. x: [T, hidden], what it reads."""
        sizes, turned = self.block.spec.sizes, turned_of(self.weights, self.block.spec.index)
        turns = turns_at(torch.arange(len(x), device=x.device), self.angles)
        q, k = (
            turned.numbers(torch.unflatten(self._module(role)(x), -1, (-1, sizes.key_width)))
            * turns[:, None]
            for role in "qk"
        )
        q, group = q[asking], q.shape[1] // k.shape[1]
        heads = [
            shares(q[:, head], k[:, head // group], later, self.scale) for head in range(q.shape[1])
        ]
        return torch.stack(heads)

    def _linear(self, role: str) -> LinearSpec:
        return next(x for x in self.block.spec.linears if x.role == role)

    def _module(self, role: str) -> nn.Module:
        return self.block.module.get_submodule(self._linear(role).module)


def attention_input(block: LoadedBlock, linear: LinearSpec, entering: BlockInput) -> Tensor:
    """What a linear of attention reads: [rows, length, hidden]; no more is computed."""
    seen = list[Tensor]()

    def keep(_: str, x: Tensor) -> None:
        seen.append(x.view(*entering.hidden.shape[:2], -1))

    def run() -> None:
        block.run(entering)

    collect(block.module, [linear], run, keep, stop_after_last=True)
    return seen[0]


def texts_of(
    pair: Pair,
    teacher: AttendingBlock,
    parts_of: Callable[[BlockInput], "LatentParts"],
    ranks: Ranks,
) -> Iterator[tuple[AskingText, bool]]:
    """Texts of the chains, each with whether it is held out; of many one in so many."""
    batches = pair.chains.batches
    tokens = summed_count(ranks, sum(map(_tokens, batches)))
    length = max((batch.ids.shape[1] for batch in batches), default=1)
    looked = Looked.of(tokens, pair.edited.spec.sizes.heads, length)
    met = {True: 0, False: 0}
    for batch, entering in zip(batches, pair.edited.inputs(), strict=True):
        is_held = pair.chains.is_held(batch)
        rows = range(-met[is_held] % looked.texts, len(batch.ids), looked.texts)
        met[is_held] += len(batch.ids)
        if not rows:
            continue
        with torch.no_grad():
            parts = parts_of(entering)
            given = teacher.read(entering)
            for row in rows:
                real = slice(None) if entering.mask is None else entering.mask[row]
                yield _text(parts.row(row, real), given[row][real], teacher, looked.tokens), is_held


def _tokens(batch: TokenBatch) -> int:
    """Without padding."""
    return batch.ids.numel() if batch.mask is None else int(batch.mask.sum())


@dataclass(frozen=True, slots=True, eq=False)
class LatentParts:
    """Of a batch, or a text of it, [..., T, *] each: what queries read, latents, rotated keys
    before any rotation, as they lie. angles: fp64 [S], of the rotated key."""

    read: Tensor
    latents: Tensor
    keys: Tensor
    angles: Tensor

    @classmethod
    def of(
        cls, block: LoadedBlock, norms: Norms, kind: Latent, entering: BlockInput
    ) -> "LatentParts":
        linears = {x.role: x for x in block.spec.linears}
        x = attention_input(block, linears["kv_a"], entering)
        assert norms.kv_latent is not None, "the latent has a norm"
        module = block.module.get_submodule
        both = module(linears["kv_a"].module)(x)
        latents = module(norms.kv_latent)(both[..., : kind.rank])
        read = x
        if "q_a" in linears:
            assert norms.query_latent is not None, "the latent of queries has a norm"
            read = module(norms.query_latent)(module(linears["q_a"].module)(x))
        assert kind.rope is not None, "the class rotates"
        angles = frequencies(kind.rope).to(x.device)
        return cls(read, latents, both[..., kind.rank :], angles)

    def row(self, row: int, real: Tensor | slice) -> "LatentParts":
        wanted = self.read, self.latents, self.keys
        # Copies: a view would keep the whole batch.
        read, latents, keys = (x[row][real].to(torch.float32, copy=True) for x in wanted)
        return LatentParts(read, latents, keys, self.angles)


def _text(parts: LatentParts, given: Tensor, teacher: AttendingBlock, every: int) -> AskingText:
    """given: [T, hidden], what the teacher's attention reads."""
    positions = torch.arange(len(given), device=given.device)
    asking = positions[every - 1 :: every] if len(given) >= every else positions
    later = positions > asking[:, None]
    turns = turns_at(positions, parts.angles).to(torch.complex64)
    attended = teacher.attended(given, asking, later)
    return AskingText(
        parts.read[asking],
        parts.latents,
        as_complex(parts.keys) * turns,
        turns[asking],
        attended,
        later,
    )
