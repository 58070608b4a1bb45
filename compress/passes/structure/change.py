"""What becomes of the linears of a block: its sites are changed in place one after the other."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.arch.resize.cut import Kept, cut, cut_name
from compress.arch.spec import BlockSpec, LinearSpec
from compress.blocks.experts import route_among
from compress.blocks.linear import linear_bias, linear_weight, set_linear_weight
from compress.blocks.walk import LoadedBlock
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.edits import EDITS
from compress.edits.learned import (
    BySite,
    ExpertChoice,
    LinearChange,
    Site,
    joined,
    producers_of,
)
from compress.edits.repair.ridge import Affine
from compress.formats import Weights
from compress.passes.context import PassContext, block_tensors, record_unit
from compress.passes.edit import WRITTEN
from compress.passes.ranks import Ranks, decided
from compress.passes.structure.attention.heads import pooled
from compress.passes.structure.files import FACTS
from compress.passes.structure.gradients import Changes
from compress.passes.structure.mixture import expert_fact, look_at_experts, observe_mixture
from compress.passes.structure.observe import Pair, affine_of, observe
from compress.passes.structure.tokens import ReadsModel
from compress.plan.passes import PassPlan

NONE: Mapping[str, float] = MappingProxyType({})


class ChangesBlocks(Protocol):
    """What changing a block takes; a pass that writes has it too."""

    @property
    def work(self) -> ReadsModel: ...
    @property
    def planned(self) -> PassPlan: ...
    @property
    def learned(self) -> BySite: ...
    @property
    def changes(self) -> Changes:
        """Of the loss, where the edit asks for gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class LearnedPass:
    """What the pass works with. source: the recipe's, which the chain beside it is of. changes: of
    the loss without each channel, where the edit asks for gradients."""

    work: PassContext
    planned: PassPlan
    source: Weights
    folder: Path
    changes: Changes = field(default_factory=dict)

    @property
    def learned(self) -> BySite:
        found = EDITS[self.method].work
        assert isinstance(found, BySite), "the edit looks at no data"
        return found

    @property
    def method(self) -> str:
        assert self.planned.stage is not None, "the pass is no edit"
        return self.planned.stage.method

    @property
    def config(self) -> Any:
        assert self.planned.stage is not None, "the pass is no edit"
        return self.planned.stage.config


def changed(
    each: ChangesBlocks, pair: Pair, config: Any, *, exact: bool = False
) -> Iterator[LinearChange]:
    """Change the linears of the edited block site by site, in place. exact: in fp32, whatever the
    checkpoint holds.

    Both blocks are freed before the last linears are refitted: all else of them lies in
    checkpoints, and the widest solve of the pass is that of the last site.
    """
    work, block = each.work, pair.edited.spec
    experts: Collection[int] = range(block.sizes.experts)
    sites = list(each.learned.sites(block, config))
    for place, site in enumerate(sites, 1):
        if pair.plain and all(x.role in ("router", "down") for x in site.linears):
            pair.source.free()  # its stored outputs say all that is asked
        if site.heads is not None:
            yield from _heads_in_place(work, pair, site, exact=exact)
            continue
        if site.experts is not None:
            choice = _experts_in_place(pair, site, site.experts, work.ranks)
            assert choice.kept.experts is not None, "no expert stays"
            experts = choice.kept.experts.tolist()
            yield choice
            continue
        turns = list(site.among(experts).turns())
        for turn in turns:
            is_last = place == len(sites) and turn is turns[-1]
            for change in _changed_at(each, pair, turn, config, is_last=is_last):
                yield _in_place(work, pair.edited, change, exact=exact)


def _experts_in_place(pair: Pair, site: Site, choice: ExpertChoice, ranks: Ranks) -> LinearChange:
    """The choice of the experts that stay; from now on the edited block knows no others."""
    (router,) = site.linears
    seen = look_at_experts(pair, router, ranks, drift=choice.drift)
    kept = decided(ranks, partial(choice.choose, seen, choice.keep))
    fact = expert_fact(router, seen, kept)
    route_among(pair.edited.module, router.module, kept)
    return LinearChange(router, None, Kept(experts=kept.cpu()), fact)


def _heads_in_place(
    work: ReadsModel, pair: Pair, site: Site, *, exact: bool
) -> Iterator[LinearChange]:
    """The linears of attention with heads that share keys and values."""
    for change in pooled(work, pair, site):
        yield _in_place(work, pair.edited, change, exact=exact)


def _changed_at(
    each: ChangesBlocks, pair: Pair, turn: Site, config: Any, *, is_last: bool
) -> Iterator[LinearChange]:
    """What the linears of a turn of a site become. is_last: whether none follows in the block."""
    ranks, block = each.work.ranks, pair.edited.spec
    seen = (observe_mixture if turn.is_mixture else observe)(pair, turn, ranks)
    linears = [_Linear.of(pair.edited, x, turn) for x in turn.linears]
    if is_last:
        pair.source.free()
        pair.edited.free()
    while linears:
        linear = linears.pop(0)
        name = linear.spec.name
        changes = each.changes.get(name, ())
        of_it = replace(seen.pop(name), producers=linear.producers, changes=changes)
        parts = (block, linear.spec, linear.now, of_it, config)
        change = decided(ranks, partial(each.learned.change, *parts))
        del of_it, parts, linear  # or they would live on beside the next one's solve
        yield change


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    """A linear of a block that may be freed. producers: see `SiteMoments`."""

    spec: LinearSpec
    now: Affine
    producers: tuple[Tensor, ...]

    @classmethod
    def of(cls, block: LoadedBlock, linear: LinearSpec, site: Site) -> "_Linear":
        """A linear of a site, as views."""
        producers = _producers(block, linear) if site.producers else ()
        return cls(linear, affine_of(block, linear), producers)


def _producers(block: LoadedBlock, linear: LinearSpec) -> tuple[Tensor, ...]:
    """Weights [K, *] whose row c makes channel c of what a linear reads."""
    weights = [linear_weight(block.module, x) for x in producers_of(block.spec, linear)]
    return tuple(part for weight in weights for part in torch.split(weight, linear.shape[1]))


def _in_place(
    work: ReadsModel, block: LoadedBlock, change: LinearChange, *, exact: bool
) -> LinearChange:
    """The change with the values that the checkpoint will hold; the block computes with them."""
    assert change.now is not None, "an edit says what a linear becomes"
    linear, bias = change.linear, change.now.bias

    def stored(value: Tensor, tensor: str) -> Tensor:
        dtype = work.weights.checkpoint.tensors[tensor].dtype
        return value.to(torch.float32 if exact else TORCH_DTYPES[dtype])

    weight = stored(change.now.weight, linear.tensor)
    now = Affine(weight, None if bias is None else stored(bias, linear.tensor))
    beside = {name: stored(value, name) for name, value in change.beside.items()}
    if block.held is not None:
        paths = dict(block.spec.modules)
        for name, value in beside.items():
            block.held.get_parameter(paths[name]).copy_(value)
        set_linear_weight(block.held, linear, now.weight)
        if now.bias is not None:
            linear_bias(block.held, linear).copy_(now.bias)
    return replace(change, now=now, beside=beside)


def cut_block(
    each: ChangesBlocks,
    block: BlockSpec,
    changes: Sequence[LinearChange],
    layers: Sequence[int] | None,
    scales: Mapping[str, float] = NONE,
) -> dict[str, Tensor]:
    """The tensors that are left of a block, by the names they have when these blocks stay. scales:
    what some of them are multiplied by."""
    kept = joined([change.kept for change in changes])
    after: dict[str, Tensor] = {}
    for change in changes:
        if change.now is None:
            continue
        linear, weight = change.linear, change.now.weight
        after |= change.beside
        after[linear.tensor] = weight.t() if linear.transposed else weight
        if change.now.bias is not None:
            after[f"{linear.name}.bias"] = change.now.bias
    tensors = {}
    for name in block_tensors(block):
        value = after.pop(name, None)
        if value is None:
            value = each.work.weights.checkpoint.read(name, check_finite=True)
        if name in scales:
            value = (value.float() * scales[name]).to(value.dtype)
        to = cut_name(each.work.weights.spec, name, kept, layers)
        if to is not None:
            tensors[to] = cut(block, name, value.cpu(), kept).contiguous()
    assert not after, f"no tensor of the block: {sorted(after)}"
    return tensors


def record_written(
    each: LearnedPass, unit: str, names: list[str], facts: Sequence[dict[str, Any]] = ()
) -> None:
    """Flush what a unit wrote, then record it. facts: lines of the report."""
    if each.work.ranks.rank == 0:
        each.work.writer.flush(names)
    each.work.writer.written |= set(names)
    record_unit(each.work, unit, {WRITTEN: names, FACTS: list(facts)})
