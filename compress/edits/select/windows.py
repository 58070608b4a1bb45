"""Which layers can do with a window, by what the model loses when they get one.

Each measurement is one walk over the blocks, of one model whose layers may have a window or not:
one block and one batch of states are in memory, and for each layer that is tried there is a store
of what the model gives with the window in it, too.

The choice is greedy, from a model that sees everything: each time the layer gets a window with
which the loss is least, beside those that have one. So the first step is each layer's loss alone,
and every step is taken near the source, where losses tell layers apart; from the other end, with
windows everywhere, the first one compares models that are all far from it. On tale-6m both ends
came to the best of all sets of 2 to 5 of its 6 layers, and what layers lose alone to all but one
(windows of 32 and 64 on rows of 256 tokens, of 128 on rows of 512).
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType

from compress.arch.spec import BlockSpec
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, LoadedBlock, Passage
from compress.edits.select.depth import Losses, Scratch


@dataclass(frozen=True, slots=True, eq=False)
class Versions:
    """A model whose layers may have a window. full, windowed: chains of its weights over the same
    batches and one store, as decoders without any window and with one in every layer that may have
    one."""

    full: Chain
    windowed: Chain

    def load(self, spec: BlockSpec, *, windowed: bool) -> LoadedBlock:
        """A block as the one or the other, with the states that enter it."""
        return (self.windowed if windowed else self.full).load(spec)


@dataclass(frozen=True, slots=True)
class Gain:
    """A layer that gets a window. losses: by index, with a window in each layer that could have got
    one, in the units of the measure."""

    layer: int
    losses: Mapping[int, float]


def choose_by_loss(
    versions: Versions, able: Sequence[int], count: int, scratch: Scratch, losses: Losses
) -> Iterator[Gain]:
    """Give a window to `count` of the layers `able`, one after another, each time to the one with
    which the loss is least.

    With m layers left a step loads each block once or twice and runs half of all blocks m times:
    what enters a layer is the same for all models that change a later one. It makes m stores.
    """
    left, windowed = list(able), list[int]()
    assert count <= len(left), "so many layers may get a window"
    for _ in range(count):
        found = losses_with(versions, windowed, left, scratch, losses)
        layer = min(found, key=lambda index: (found[index], index))
        left.remove(layer)
        windowed.append(layer)
        yield Gain(layer, found)


def choose_alone(
    versions: Versions, able: Sequence[int], count: int, scratch: Scratch, losses: Losses
) -> Iterator[Gain]:
    """Give a window to the `count` layers that lose least alone: one step for all of them."""
    found = losses_with(versions, (), able, scratch, losses)
    for layer in sorted(found, key=lambda index: (found[index], index))[:count]:
        yield Gain(layer, found)


def losses_with(
    versions: Versions,
    windowed: Collection[int],
    tried: Collection[int],
    scratch: Scratch,
    losses: Losses,
) -> dict[int, float]:
    """By index, the loss of the model with windows in the layers `windowed` and in each of the
    layers `tried`. A loss that is not a number counts as infinite."""
    chain = versions.full
    (own,) = chain.states
    with ExitStack() as stack:
        changed: dict[int, HiddenStates] = {}
        chain.embed()
        for spec in chain.weights.spec.blocks:
            before = list(changed.values())
            if spec.index in tried:
                changed[spec.index] = stack.enter_context(scratch(f"with.{spec.index}"))
                _run(versions.load(spec, windowed=True), [(own, changed[spec.index])])
            block = versions.load(spec, windowed=spec.index in windowed)
            _run(block, [(states, states) for states in (*before, own)])
        found = losses([replace(chain, states=(states,)) for states in changed.values()])
    values = [math.inf if math.isnan(x) else x for x in found]
    return dict(zip(changed, values, strict=True))


def _run(block: LoadedBlock, ways: Sequence[tuple[HiddenStates, HiddenStates]]) -> None:
    """Run a block from the one store to the other, for each pair, and free it."""
    for source, target in ways:
        block.on(Passage(block.between.batches, source, target)).run_on()
    block.free()


# What to go by -> the layers that get a window, the first to get one first.
Choose = Callable[[Versions, Sequence[int], int, Scratch, Losses], Iterator[Gain]]
WINDOWS_BY: Mapping[str, Choose] = MappingProxyType({"loss": choose_by_loss, "alone": choose_alone})
