"""Which blocks a model can do without, by what they do to its hidden states or to its loss.

A model from which blocks are removed is the list of the indices that stay, `kept`, ascending. Each
measurement is one walk over those blocks, from the embeddings on, of a chain with a single store:
one block and one batch of states are in memory, and what else is needed of the states lies in
stores that the caller makes. Padding counts nowhere.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, LoadedBlock, Passage, walk
from compress.errors import DataError

# Makes a scratch store, under a name of its own, with the tensors of the chain's.
Scratch = Callable[[str], HiddenStates]
# The loss of each of several models, from their chains when the last block is passed.
Losses = Callable[[Sequence[Chain]], Sequence[float]]
# Of hidden states before and after, fp64 [rows, length, hidden] each: a number for every token.
Change = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Removal:
    """A block that goes. whole: the loss with it; losses: by index, without each block that could
    have gone, in the units of the measure."""

    block: int
    whole: float
    losses: Mapping[int, float]

    @property
    def loss(self) -> float:
        return self.losses[self.block]


def influence(chain: Chain, kept: Sequence[int], scratch: Scratch) -> Tensor:
    """Block Influence of ShortGPT (2403.03853): 1 - E cos(what enters a block, what leaves it).

    Returns fp64 [len(kept)]: the less, the sooner a block goes. One store is made.
    """
    return 1 - _over_runs(chain, kept, 1, scratch, _cosine)


def angular(chain: Chain, kept: Sequence[int], run: int, scratch: Scratch) -> Tensor:
    """Angular distance (2403.17887) of runs of blocks: E arccos(cos(x, y)) / pi, of what enters the
    first (x) and what leaves the last (y) of `run` blocks in a row.

    The paper takes the last token of each text. Rows of packed text have no such token, so here it
    is the mean over all of them. Returns fp64 [len(kept) - run + 1], by the place of the run's
    first block in `kept`: the run with the least goes. `run` stores are made.
    """
    return _over_runs(chain, kept, run, scratch, lambda x, y: _cosine(x, y).arccos() / math.pi)


def least(scores: Tensor, kept: Sequence[int], count: int) -> tuple[int, ...]:
    """The `count` blocks with the lowest scores [len(kept)], that of the lowest first; of equals
    the first block."""
    order = scores.argsort(stable=True)[:count]
    return tuple(kept[place] for place in order.tolist())


def least_run(scores: Tensor, kept: Sequence[int]) -> tuple[int, ...]:
    """The blocks of the run with the lowest of `angular`'s scores; of equals the first run."""
    first, run = int(scores.argmin()), len(kept) - len(scores) + 1
    return tuple(kept[first : first + run])


def remove_by_loss(
    chain: Chain,
    count: int,
    scratch: Scratch,
    losses: Losses,
    *,
    kept: Sequence[int] | None = None,
) -> Iterator[Removal]:
    """Remove `count` blocks one after another, each time the one without which the loss is least.

    kept: the blocks that are there, all by default; a caller that goes on gives those that were
    left. With m blocks a removal loads each block once and runs blocks m (m + 1) / 2 times: what
    enters a block is the same for all models that lack a later one. It makes m stores.
    """
    blocks = len(chain.weights.spec.blocks)
    left = list(range(blocks) if kept is None else kept)
    assert count < len(left), "a block must stay"
    for _ in range(count):
        whole, found = losses_without(chain, left, scratch, losses)
        gone = min(found, key=lambda index: (found[index], index))
        left.remove(gone)
        yield Removal(gone, whole, found)


def losses_without(
    chain: Chain, kept: Sequence[int], scratch: Scratch, losses: Losses
) -> tuple[float, dict[int, float]]:
    """The loss of the model, and by index that without each of its blocks.

    A loss that is not a number counts as infinite.
    """
    with ExitStack() as stack:
        without: dict[int, HiddenStates] = {}
        for block in _walk(chain, kept):
            for states in without.values():
                block.on(Passage(chain.batches, states, states)).run_on()
            index = block.spec.index
            without[index] = stack.enter_context(scratch(f"without.{index}"))
            _copy(chain, without[index])
            block.run_on()
        chains = [chain, *(replace(chain, states=(states,)) for states in without.values())]
        whole, *found = (math.inf if math.isnan(x) else x for x in losses(chains))
    return whole, dict(zip(without, found, strict=True))


def _by_loss(chain: Chain, count: int, scratch: Scratch, losses: Losses) -> tuple[int, ...]:
    return tuple(removal.block for removal in remove_by_loss(chain, count, scratch, losses))


def _by_influence(chain: Chain, count: int, scratch: Scratch, losses: Losses) -> tuple[int, ...]:
    every = range(len(chain.weights.spec.blocks))
    return least(influence(chain, every, scratch), every, count)


def _by_angular(chain: Chain, count: int, scratch: Scratch, losses: Losses) -> tuple[int, ...]:
    every = range(len(chain.weights.spec.blocks))
    return least_run(angular(chain, every, count, scratch), every)


# What to go by -> the `count` blocks (one or more) of a whole model that go, the first to go first.
REMOVALS: Mapping[str, Callable[[Chain, int, Scratch, Losses], tuple[int, ...]]] = MappingProxyType(
    {"loss": _by_loss, "influence": _by_influence, "angular": _by_angular}
)


def _walk(chain: Chain, kept: Sequence[int]) -> Iterator[LoadedBlock]:
    assert len(chain.states) == 1, "what enters and leaves a block lies in one store"
    assert list(kept) == sorted(set(kept)), "blocks come in order"
    chain.embed()
    yield from walk(chain, [chain.weights.spec.blocks[index] for index in kept])


def _over_runs(
    chain: Chain, kept: Sequence[int], run: int, scratch: Scratch, change: Change
) -> Tensor:
    """What each run of blocks in a row changes, a mean over all tokens: fp64 [runs]."""
    assert 1 <= run <= len(kept), "a run is of blocks that are there"
    found = []
    with ExitStack() as stack:
        entered = [stack.enter_context(scratch(f"entered.{i}")) for i in range(run)]
        for place, block in enumerate(_walk(chain, kept)):
            _copy(chain, entered[place % run])
            block.run_on()
            first = place + 1 - run
            if first >= 0:
                found.append(_mean(chain, entered[first % run], change))
                _refuse_nonfinite(found[-1], block)
    return torch.tensor(found, dtype=torch.float64)


def _copy(chain: Chain, states: HiddenStates) -> None:
    """Keep what enters the block at which the walk has stopped."""
    for batch in chain.batches:
        states.write(batch.index, chain.states[0].read(batch.index, 0, len(batch.ids)))


def _mean(chain: Chain, before: HiddenStates, change: Change) -> float:
    """Over all tokens that are no padding, from `before` to what the chain holds now."""
    total, tokens = 0.0, 0
    for batch in chain.batches:
        rows = len(batch.ids)
        x, y = (s.read(batch.index, 0, rows).double() for s in (before, chain.states[0]))
        values = change(x, y)  # [rows, length]
        values = values.flatten() if batch.mask is None else values[batch.mask]
        total, tokens = total + float(values.sum()), tokens + len(values)
    return total / max(tokens, 1)


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    """fp64 [rows, length], in [-1, 1] in spite of rounding."""
    return cosine_similarity(x, y, dim=-1, eps=1e-300).clamp(-1, 1)


def _refuse_nonfinite(value: float, block: LoadedBlock) -> None:
    if not math.isfinite(value):
        raise DataError(
            f"{block.spec.prefix} makes numbers of the calibration text that are not finite, so its"
            " influence cannot be told; use --dtype fp32, or other text"
        )
