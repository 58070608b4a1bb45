"""Which tensors edits change, told by their plans: what `train: changed` trains.

A linear that is refitted counts, also where the refit finds nothing better and leaves it as it was.
So a plan counts exactly what the run trains; of sizes that have yet to be measured the most, as
any linear may lose something.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

from compress.arch.forward.table import FORWARDS
from compress.arch.resize.names import block_name
from compress.arch.spec import BlockSpec, LinearSpec
from compress.checkpoint.outline import Outline
from compress.distill.memory import all_names
from compress.edits import EDITS
from compress.edits.distill import DistillConfig
from compress.edits.edit import ByConfig
from compress.edits.learned import BySite
from compress.edits.narrowing import ByBasis
from compress.edits.prune import PruneConfig
from compress.recipe import EditStage


class PlannedEdit(Protocol):
    """A pass as it is planned: see `PassPlan`."""

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> EditStage | None: ...
    @property
    def source(self) -> Outline: ...
    @property
    def result(self) -> Outline: ...
    @property
    def kept(self) -> tuple[int, ...]: ...
    @property
    def origin(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class _Changed:
    """tensors: by their names behind the passes so far. cast: whether these were cast, which alone
    is no change. apart: whether the model computes something else than the source from its first
    block on, whatever became of that block."""

    tensors: frozenset[str] = frozenset()
    cast: bool = False
    apart: bool = False


def changed_before(passes: Sequence[PlannedEdit], planned: PlannedEdit) -> frozenset[str]:
    """Tensors of the model that a pass reads, which passes before it have changed.

    passes: of all edits, in order; `planned` and those behind it do not count. None of the tensors
    where no earlier stage changes any: a recipe cannot ask for them then.
    """
    before = list(takewhile(lambda each: each.name != planned.name, passes))
    if all(_is_own(each, planned) or _copies(each) for each in before):
        return frozenset()
    found = _Changed()
    for each in before:
        found = _after(found, each, len(passes[0].source.spec.blocks))
    return found.tensors


def _is_own(before: PlannedEdit, planned: PlannedEdit) -> bool:
    """Whether a pass is of the same stage."""
    assert before.stage is not None, "the pass is no edit"
    return planned.stage is not None and before.stage.index == planned.stage.index


def _copies(planned: PlannedEdit) -> bool:
    """Whether a pass changes config.json alone."""
    assert planned.stage is not None, "the pass is no edit"
    return isinstance(EDITS[planned.stage.method].work, ByConfig)


def _after(before: _Changed, planned: PlannedEdit, blocks: int) -> _Changed:
    """What has changed behind a pass. blocks: of the model that the run is given."""
    assert planned.stage is not None, "the pass is no edit"
    work, config, result = EDITS[planned.stage.method].work, planned.stage.config, planned.result
    called = _called(planned)
    carried = {called[name] for name in before.tensors if name in called}
    found = frozenset(carried.union(_reshaped(planned, called)))
    if isinstance(config, DistillConfig):
        found = found.union(_trained(config, result))
    elif isinstance(work, BySite):
        found = _by_sites(replace(before, tensors=found), planned, work, blocks)
    elif isinstance(work, ByBasis):
        found = found.union(_biases(result.spec.linears()))
    elif _copies(planned):  # config.json alone says something else
        return replace(before, tensors=found, apart=True)
    elif _is_cast(planned):
        # What was rounded twice is not what the last cast makes of the source.
        every = frozenset(result.tensors) if before.cast else found
        return _Changed(every, cast=True, apart=True)
    return replace(before, tensors=found)


def _by_sites(before: _Changed, planned: PlannedEdit, work: BySite, blocks: int) -> frozenset[str]:
    """Behind an edit that refits linears: where the stream that they write to is not the source's,
    so they have something to mend."""
    stage, result, found = planned.stage, planned.result, set(before.tensors)
    assert stage is not None, "the pass is no edit"
    if isinstance(stage.config, PruneConfig) and stage.is_open:
        return before.tensors.union(_tensors(result.spec.linears()))
    lost = before.apart or stage.is_open or planned.origin[0] > 0 or work.land is not None
    lost = lost or result.spec.embedding in found
    ends, called = (*planned.origin[1:], blocks), _called(planned)
    reads = [planned.source.spec.blocks[index] for index in planned.kept]
    if work.land is not None:  # they are in the new class when their sites are looked at
        reads, called = list(result.spec.blocks), {name: name for name in result.tensors}
    turns = zip(result.spec.blocks, reads, planned.origin, ends, strict=True)
    for block, was, start, end in turns:
        for site in work.sites(was, stage.config):
            names = {called[name] for name in _tensors(site.linears) if name in called}
            names.update(() if site.heads is None else _key_norm(result, block))
            fills = end - start > 1 and all(x.role == "down" for x in site.linears)  # a gap behind
            mends = lost or fills or site.heads is not None or not found.isdisjoint(names)
            found |= names if mends and site.experts is None else set()
            lost = lost or mends
        if block.sizes.experts != was.sizes.experts:  # those that stay are numbered anew
            found.update(_tensors(x for x in block.linears if x.expert is not None))
        lost = lost or end - start > 1 or any(name in found for name, _ in block.modules)
    return frozenset(found)


def _trained(config: DistillConfig, model: Outline) -> Iterable[str]:
    """What an earlier training may have changed, beside what was."""
    if config.scope == ("block",):
        return (name for block in model.spec.blocks for name, _ in block.modules)
    if config.train == ("lora",):
        return (x.tensor for x in model.spec.linears() if x.role != "router")
    return all_names(model) if config.train == ("all",) else ()


def _is_cast(planned: PlannedEdit) -> bool:
    before, after = planned.source.tensors, planned.result.tensors
    return any(x.dtype != after[name].dtype for name, x in before.items() if name in after)


def _called(planned: PlannedEdit) -> Mapping[str, str]:
    """Tensors of a pass's source that are in its result -> their names there."""
    spec, there = planned.source.spec, planned.result.tensors
    named = ((name, block_name(spec, name, planned.kept)) for name in planned.source.tensors)
    return {name: new for name, new in named if new is not None and new in there}


def _reshaped(planned: PlannedEdit, called: Mapping[str, str]) -> Iterator[str]:
    """Tensors of a result that its source does not have in that shape."""
    before, was = planned.source.tensors, {new: name for name, new in called.items()}
    for name, info in planned.result.tensors.items():
        if name not in was or before[was[name]].shape != info.shape:
            yield name


def _tensors(linears: Iterable[LinearSpec]) -> list[str]:
    every = list(linears)
    return [*(x.tensor for x in every), *_biases(every)]


def _biases(linears: Iterable[LinearSpec]) -> list[str]:
    return [f"{x.name}.bias" for x in linears]


def _key_norm(model: Outline, block: BlockSpec) -> Iterator[str]:
    """The norm over each head of keys, whose gain goes with keys that several heads share."""
    row = FORWARDS[model.spec.family]
    if row.qk_norm == "head" and row.norms.k is not None:
        yield f"{block.prefix}.{row.norms.k}.weight"
