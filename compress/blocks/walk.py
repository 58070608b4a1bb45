"""One walk over the blocks of a decoder, with all hidden states between two blocks in a store.

Embed, load a block, run it over every batch, store what leaves it, go on to the next: calibration,
sensitivities and evaluation differ in what they do at a block, and in nothing else. A model is a
chain: its weights, and the states that it has passed on so far. A second chain goes beside the
first as its teacher. Of each there is one block in memory, and one batch of states.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from compress.arch.spec import BlockSpec
from compress.blocks.kv_states import PassingCache
from compress.blocks.skeleton import BlockContext, Skeleton
from compress.blocks.states import HiddenStates

if TYPE_CHECKING:
    from compress.formats.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """Rows that go through a block together.

    index: of the tensor in the states that holds theirs. ids: int64 [rows, length]. mask: bool of
    the same shape, False for padding; None without any.
    """

    index: int
    ids: Tensor
    mask: Tensor | None = None


def token_batches(ids: Tensor, mask: Tensor | None, rows: int) -> tuple[TokenBatch, ...]:
    """ids [n, length] and their mask, at most `rows` rows at a time."""
    cuts = [slice(start, start + rows) for start in range(0, len(ids), rows)]
    masks = [None if mask is None else mask[cut] for cut in cuts]
    return tuple(TokenBatch(i, ids[cut], masks[i]) for i, cut in enumerate(cuts))


def no_cache(mask: Tensor | None) -> PassingCache | None:
    """Keys and values go from a block's projections to its attention as they are."""
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A model on its way through its blocks.

    batches: what goes through; there may be others, whose states another process has to do with.
    states: a tensor [rows, length, hidden] a batch. What enters block i is in number i modulo how
        many there are, what leaves it goes into the next. Of two that take turns, the one that
        enters a block is still whole when the block is done, or dies; one alone is overwritten.
    """

    skeleton: Skeleton
    weights: "Weights"
    batches: Sequence[TokenBatch]
    states: tuple[HiddenStates, ...]

    def entering(self, index: int) -> HiddenStates:
        """The states that enter block `index`; those that left the last one, for their number."""
        return self.states[index % len(self.states)]

    def embed(self, change: Callable[[Tensor], Tensor] = lambda rows: rows) -> None:
        """Store what enters block 0. change: as `Skeleton.embed` takes it."""
        for batch in self.batches:
            hidden = self.skeleton.embed(self.weights, batch.ids, batch.mask, change)
            self.entering(0).write(batch.index, hidden)

    def load(self, spec: BlockSpec, teacher: "LoadedBlock | None" = None) -> "LoadedBlock":
        """One block, between its states."""
        return LoadedBlock(
            spec,
            self.skeleton.load_block(self.weights, spec.index),
            self.skeleton,
            Passage(self.batches, self.entering(spec.index), self.entering(spec.index + 1)),
            teacher,
        )

    def final(self) -> Iterator[Tensor]:
        """What left the last block, behind the final norm: [rows, length, hidden], by batch."""
        last = self.entering(len(self.weights.spec.blocks))
        for batch in self.batches:
            hidden = last.read(batch.index, 0, len(batch.ids)).to(self.skeleton.device)
            yield self.skeleton.final_hidden(self.weights, hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """States before and behind a block. They may hold more rows of a batch than the batch has: then
    its first ones are meant."""

    batches: Sequence[TokenBatch]
    source: HiddenStates
    target: HiddenStates


@dataclass(frozen=True, slots=True, eq=False)
class BlockInput:
    """Batch `index` as it enters a block. hidden: [rows, length, hidden] on the block's device."""

    index: int
    hidden: Tensor
    mask: Tensor | None
    context: BlockContext


@dataclass(slots=True, eq=False)
class LoadedBlock:
    """A block with its weights, where the walk has stopped.

    held: the module, None once the walk went on. between: the states of its chain. teacher: the
    same block of the chain beside. passed: whether the states behind it are complete.
    """

    spec: BlockSpec
    held: nn.Module | None
    skeleton: Skeleton
    between: Passage
    teacher: "LoadedBlock | None" = None
    passed: bool = False

    @property
    def module(self) -> nn.Module:
        assert self.held is not None, "the walk went on, and freed this block"
        return self.held

    @property
    def target(self) -> HiddenStates:
        return self.between.target

    @property
    def is_passed(self) -> bool:
        """Whether all that goes on to the next block is stored."""
        return self.passed and (self.teacher is None or self.teacher.passed)

    def inputs(self) -> Iterator[BlockInput]:
        """Every batch, as it enters."""
        source, device = self.between.source, self.skeleton.device
        for batch in self.between.batches:
            context = self.skeleton.context(batch.ids, batch.mask)
            hidden = source.read(batch.index, 0, len(batch.ids)).to(device)
            yield BlockInput(batch.index, hidden, batch.mask, context)

    def run(self, entering: BlockInput, cache: PassingCache | None = None) -> Tensor:
        """What leaves for what enters. Gradients are recorded where the module asks for them."""
        hidden, context = entering.hidden, entering.context
        return self.skeleton.run_block(self.module, self.spec.index, hidden, context, cache)

    def run_first_row(self) -> Tensor:
        """One row, padding and all: for a look at what the module does."""
        first = self.between.batches[0]
        hidden = self.between.source.read(first.index, 0, 1).to(self.skeleton.device)
        context = self.skeleton.context(first.ids[:1])
        return self.run(BlockInput(first.index, hidden, None, context))

    def run_on(
        self,
        cache: Callable[[Tensor | None], PassingCache | None] = no_cache,
        *,
        store: bool = True,
    ) -> None:
        """Run every batch, and store what leaves: the block is done, as the module is now.

        cache: what keys and values of a batch pass through, by its mask. store: False to run for
        that alone.
        """
        with torch.no_grad():
            for entering in self.inputs():
                out = self.run(entering, cache(entering.mask))
                if store:
                    self.target.write(entering.index, out)
        self.passed = store

    def on(self, between: Passage) -> "LoadedBlock":
        """The same module between other states."""
        return replace(self, between=between, teacher=None, passed=False)

    def free(self) -> None:
        """Let go of the weights."""
        self.held = None


def walk(
    chain: Chain,
    blocks: Sequence[BlockSpec] | None = None,
    *,
    teacher: Chain | None = None,
    gradients: bool = False,
) -> Iterator[LoadedBlock]:
    """Stop at one block after another, which are all unless they are given, in order.

    Who walks runs each block on, and its teacher's too, before asking for the next; what was a
    block is free by then, for two at a time would double the peak. teacher: a chain over the same
    batches, whose block is loaded beside; free it early where its states are enough. gradients:
    have the parameters of the chain's blocks ask for them; the teacher's never do.
    """
    before: LoadedBlock | None = None
    for spec in chain.weights.spec.blocks if blocks is None else blocks:
        assert before is None or before.is_passed, f"nothing was stored behind {before.spec.prefix}"
        beside = None if teacher is None else teacher.load(teacher.weights.spec.blocks[spec.index])
        before = chain.load(spec, beside)
        before.module.requires_grad_(gradients)
        yield before
        for loaded in (before, beside):
            if loaded is not None:
                loaded.free()
