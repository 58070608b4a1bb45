"""Two chains over the calibration rows: the recipe's source, and the model as it is edited.

Each has two files of hidden states that take turns, so a run that dies inside a block finds what
enters it as it was.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import BlockInput, Chain, LoadedBlock, Passage, TokenBatch, token_batches
from compress.formats import Weights
from compress.passes.structure.basis import basis_before
from compress.passes.structure.files import EDITED, SOURCE, states_path
from compress.passes.structure.streams import unscaled
from compress.passes.structure.tokens import ReadsModel, skeleton_of
from compress.plan.passes import PassPlan
from compress.plan.row_counts import EDIT_ROWS_PER_HELD, chain_rows, rows_at_once

DEFAULT_SPILL = 256 << 20  # bytes of a batch where no calibration says how many


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """source: of the recipe. edited: the model that the pass reads, with the states of the model
    that it leaves. held: the first batch whose rows are held out of every fit; so are all later.

    origin: for each block that the pass leaves, the index of the source's block it stands for;
    then the number of the source's blocks. A block also stands for those between it and the next.
    basis: fp32 [source's hidden, edited hidden], where earlier passes narrowed or scaled the
    residual stream; None where both models have the same. result: computes what the pass leaves, on
    the stream before the pass scales it.
    """

    source: Chain
    edited: Chain
    result: Skeleton
    held: int
    origin: tuple[int, ...]
    basis: Tensor | None = None

    def onto(self, stream: Tensor) -> Tensor:
        """The source's stream [..., hidden] as the edited model should have it: fp32."""
        return onto(self.basis, stream)

    def is_held(self, batch: TokenBatch | BlockInput) -> bool:
        """Whether the rows of a batch are held out of every fit."""
        return batch.index >= self.held

    @property
    def batches(self) -> Sequence[TokenBatch]:
        return self.edited.batches

    def flush(self, turn: int) -> None:
        """Make the states that enter block `turn` survive a power cut."""
        for chain in (self.source, self.edited):
            chain.entering(turn).flush()


def onto(basis: Tensor | None, stream: Tensor) -> Tensor:
    """A stream [..., hidden] in a basis [hidden, k], fp32; as it is without one."""
    return stream.float() if basis is None else stream.float() @ basis


def open_chains(
    work: ReadsModel,
    planned: PassPlan,
    source: Weights,
    tokens: tuple[Tensor, Tensor | None],
    folder: Path,
    *,
    scratch: int | None = None,
) -> Chains:
    """The chains over those tokens, with their files in `folder`; nothing is written yet.

    scratch: the states end with the caller's work, and are in memory where those of a file take at
    most so many bytes; None for states that a killed run finds again.
    """
    config = work.plan.recipe.calibration
    spill = DEFAULT_SPILL if config is None else config.spill_bytes
    ids, mask = tokens
    hidden = source.spec.hidden
    rows = chain_rows(source.spec, len(ids), ids.shape[1], spill)
    batches, held = _batches(ids, mask, min(rows, max(1, len(ids) // work.ranks.size)))
    share = batches[work.ranks.rank :: work.ranks.size]

    def chain(name: str, weights: Weights, width: int) -> Chain:
        shapes = [(*batch.ids.shape, width) for batch in batches]
        states = tuple(
            HiddenStates(states_path(folder, name, turn), shapes, work.dtype, budget=scratch)
            for turn in (0, 1)
        )
        return Chain(skeleton_of(work, weights), weights, share, states)

    result = planned.result
    computing = unscaled(result.config, result.spec, planned.stream)
    skeleton = Skeleton(computing, result.spec, dtype=work.dtype, device=work.device)
    edited = chain(EDITED, work.weights, result.spec.hidden)
    same = source.checkpoint.path == work.weights.checkpoint.path
    begun = chain(SOURCE, source, hidden)
    begun = replace(begun, skeleton=edited.skeleton) if same else begun
    origin, basis = (*planned.origin, len(source.spec.blocks)), basis_before(work, planned, folder)
    return Chains(begun, edited, skeleton, held, origin, basis)


def held_batches(ids: Tensor, mask: Tensor | None, hidden: int) -> tuple[TokenBatch, ...]:
    """The rows that are held out of every fit, as batches of their own."""
    rows = rows_at_once((*ids.shape, 2 * hidden), torch.float32, DEFAULT_SPILL)
    batches, first = _batches(ids, mask, rows)
    return tuple(replace(x, index=i) for i, x in enumerate(batches[first:]))


def _batches(ids: Tensor, mask: Tensor | None, rows: int) -> tuple[tuple[TokenBatch, ...], int]:
    """Batches of at most `rows` rows, and the number of those that hold nothing held out."""
    first = len(ids) - max(1, len(ids) // EDIT_ROWS_PER_HELD)
    masks = (None, None) if mask is None else (mask[:first], mask[first:])
    fit = token_batches(ids[:first], masks[0], rows)
    held = token_batches(ids[first:], masks[1], rows)
    return (*fit, *(replace(x, index=x.index + len(fit)) for x in held)), len(fit)


def embed(chains: Chains, *, kept: bool = True) -> None:
    """Store what enters the first block of each chain. kept: so that it survives a power cut."""
    for chain in (chains.source, chains.edited):
        chain.embed()
    pass_through(chains, range(chains.origin[0]), 0)
    if kept:
        chains.flush(0)


def load(chain: Chain, index: int, turn: int) -> LoadedBlock:
    """A block of a chain, with the states that enter block `turn` of the result."""
    passage = Passage(chain.batches, chain.entering(turn), chain.entering(turn + 1))
    module = chain.skeleton.load_block(chain.weights, index)
    return LoadedBlock(chain.weights.spec.blocks[index], module, chain.skeleton, passage)


def advance_source(chains: Chains, turn: int) -> LoadedBlock:
    """The source's block that block `turn` of the result stands for, loaded.

    Its outputs, behind those of the blocks that nothing stands for, are stored as what enters the
    next.
    """
    first, after = chains.origin[turn], chains.origin[turn + 1]
    source = load(chains.source, first, turn)
    source.run_on()
    pass_through(chains, range(first + 1, after), turn + 1)
    return source


@contextmanager
def wanted(chains: Chains, turn: int, folder: Path) -> Iterator[HiddenStates]:
    """What should enter block `turn` of the edited model: the source's states, in its basis.

    folder: for a file of them, where they are not as they are and memory is not to hold them.
    """
    given = chains.source.entering(turn)
    if chains.basis is None:
        yield given
        return
    shapes = chains.edited.entering(turn).shapes
    with HiddenStates(folder / "wanted", shapes, given.dtype, budget=DEFAULT_SPILL) as states:
        for index in range(len(shapes)):
            stream = given.read(index).to(chains.basis.device)
            states.write(index, chains.onto(stream))
        yield states


def pass_through(chains: Chains, gap: range, turn: int) -> None:
    """Pass the source's states that enter block `turn` of the result through some of its blocks, in
    place: who dies here begins the unit again, from the other file."""
    chain, states = chains.source, chains.source.entering(turn)
    for index in gap:
        loaded = chain.load(chain.weights.spec.blocks[index])
        loaded.on(Passage(chain.batches, states, states)).run_on()
