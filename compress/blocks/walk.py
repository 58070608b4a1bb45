"""Walks over the blocks of a decoder; the hidden states between two blocks are in a store.

The caller embeds the tokens (`Chain.embed`), and `walk` loads the first block. At each block the
caller runs every batch through it and stores what leaves it (`LoadedBlock.run_on`), then `walk`
loads the next. Calibration, sensitivities and evaluation differ only in what they do at a block. A
`Chain` is a model on this walk: its weights, and the states between its blocks. A second chain may
go beside it as its teacher. Memory holds one block and one batch of states of each chain.
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

    index: which tensor of the `HiddenStates` is theirs. ids: token ids, int64 [rows, length].
    mask: bool [rows, length], False for padding; None where there is no padding.
    """

    index: int
    ids: Tensor
    mask: Tensor | None = None


def token_batches(ids: Tensor, mask: Tensor | None, rows: int) -> tuple[TokenBatch, ...]:
    """Cut ids [n, length] and their mask into batches of at most `rows` rows."""
    cuts = [slice(start, start + rows) for start in range(0, len(ids), rows)]
    masks = [None if mask is None else mask[cut] for cut in cuts]
    return tuple(TokenBatch(i, ids[cut], masks[i]) for i, cut in enumerate(cuts))


def no_cache(mask: Tensor | None) -> PassingCache | None:
    """Attention reads keys and values as the block computed them."""
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A model on its way through its blocks.

    batches: those that this process runs; other ranks may run others of the same states.
    states: one store or several, each with a tensor [rows, length, hidden] for each batch. What
        enters block i is in store i modulo their number, what leaves it goes into the next store.
        With two, the input of a block is still whole when the process dies in that block; a single
        store is overwritten in place.
    """

    skeleton: Skeleton
    weights: "Weights"
    batches: Sequence[TokenBatch]
    states: tuple[HiddenStates, ...]

    def entering(self, index: int) -> HiddenStates:
        """The states that enter block `index`. Behind the last block: those that left it."""
        return self.states[index % len(self.states)]

    def embed(self, change: Callable[[Tensor], Tensor] = lambda rows: rows) -> None:
        """Store the embeddings, which enter block 0. change: see `Skeleton.embed`."""
        for batch in self.batches:
            hidden = self.skeleton.embed(self.weights, batch.ids, batch.mask, change)
            self.entering(0).write(batch.index, hidden)

    def load(self, spec: BlockSpec, teacher: "LoadedBlock | None" = None) -> "LoadedBlock":
        """Load a block, with the states that enter it and those that leave it."""
        return LoadedBlock(
            spec,
            self.skeleton.load_block(self.weights, spec.index),
            self.skeleton,
            Passage(self.batches, self.entering(spec.index), self.entering(spec.index + 1)),
            teacher,
        )

    def final(self) -> Iterator[Tensor]:
        """For each batch, what the final norm makes of the last block's output.

        Yields [rows, length, hidden].
        """
        last = self.entering(len(self.weights.spec.blocks))
        for batch in self.batches:
            hidden = last.read(batch.index, 0, len(batch.ids)).to(self.skeleton.device)
            yield self.skeleton.final_hidden(self.weights, hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """The states that enter a block (source) and those that leave it (target).

    Where they hold more rows for a batch than the batch has, its rows are the first ones.
    """

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
    """A block with its weights: where the walk has stopped.

    held: the module; None once it is freed. between: the states before and after the block.
    teacher: the same block of the teacher's chain. passed: whether the outputs of all batches are
    stored.
    """

    spec: BlockSpec
    held: nn.Module | None
    skeleton: Skeleton
    between: Passage
    teacher: "LoadedBlock | None" = None
    passed: bool = False

    @property
    def module(self) -> nn.Module:
        assert self.held is not None, "this block was freed"
        return self.held

    @property
    def target(self) -> HiddenStates:
        return self.between.target

    @property
    def is_passed(self) -> bool:
        """Whether the outputs of this block, and of its teacher's, are stored."""
        return self.passed and (self.teacher is None or self.teacher.passed)

    def inputs(self) -> Iterator[BlockInput]:
        """Every batch, as it enters the block."""
        for batch in self.between.batches:
            yield self._entering(batch)

    def input(self, index: int) -> BlockInput:
        """The batch of that index, as it enters the block."""
        return self._entering(next(x for x in self.between.batches if x.index == index))

    def _entering(self, batch: TokenBatch) -> BlockInput:
        context = self.skeleton.context(batch.ids, batch.mask)
        hidden = self.between.source.read(batch.index, 0, len(batch.ids)).to(self.skeleton.device)
        return BlockInput(batch.index, hidden, batch.mask, context)

    def run(self, entering: BlockInput, cache: PassingCache | None = None) -> Tensor:
        """The block's output [rows, length, hidden] for one batch.

        Gradients are recorded where the module's parameters require them.
        """
        hidden, context = entering.hidden, entering.context
        return self.skeleton.run_block(self.module, self.spec.index, hidden, context, cache)

    def run_first_row(self) -> Tensor:
        """The block's output [1, length, hidden] for the first row, its padding included.

        For a caller that observes how the module runs, and not what it computes.
        """
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
        """Run every batch through the module as it is now, and store the outputs.

        cache: makes of a batch's mask the cache that its keys and values pass through. store: False
        to run only for what that cache sees.
        """
        with torch.no_grad():
            for entering in self.inputs():
                out = self.run(entering, cache(entering.mask))
                if store:
                    self.target.write(entering.index, out)
        self.passed = store

    def on(self, between: Passage) -> "LoadedBlock":
        """The same module with other states before and after it, and without a teacher."""
        return replace(self, between=between, teacher=None, passed=False)

    def free(self) -> None:
        """Free the weights."""
        self.held = None


def run_through(chain: Chain) -> None:
    """Embed the tokens and pass them through all blocks: what left the last one is stored."""
    chain.embed()
    for block in walk(chain):
        block.run_on()


def walk(
    chain: Chain,
    blocks: Sequence[BlockSpec] | None = None,
    *,
    teacher: Chain | None = None,
    gradients: bool = False,
) -> Iterator[LoadedBlock]:
    """Load one block after another and stop at each.

    The caller runs each block with `run_on`, and its teacher's block too, before it asks for the
    next. A block is freed before the next is loaded: two at a time would double the peak memory.
    blocks: in order; None for all. teacher: a chain over the same batches, whose block is loaded
    too; the caller may free it once its outputs are stored. gradients: the parameters of the
    chain's blocks require gradients; the teacher's never do.
    """
    loaded: LoadedBlock | None = None
    for spec in chain.weights.spec.blocks if blocks is None else blocks:
        assert loaded is None or loaded.is_passed, f"no output of {loaded.spec.prefix} is stored"
        beside = None if teacher is None else teacher.load(teacher.weights.spec.blocks[spec.index])
        loaded = chain.load(spec, beside)
        loaded.module.requires_grad_(gradients)
        yield loaded
        loaded.free()
        if beside is not None:
            beside.free()
