"""The calibrated pass: block by block, load, observe, solve, write, run on, free.

A block is observed unquantized, on the inputs that the quantized blocks before it produce, so that
each layer also makes up for what its predecessors lost. Its outputs with the new weights become the
next block's inputs. Only one block, its Hessians and a batch of hidden states are in memory.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from compress_calibration.hessian import GramAccumulator, Stats
from torch import Tensor, nn

from compress.arch.spec import BlockSpec, LinearSpec
from compress.blocks.capture import collect, regroup
from compress.blocks.experts import expert_views
from compress.blocks.linear import set_linear_weight
from compress.blocks.skeleton import BlockContext, Skeleton
from compress.methods import METHODS
from compress.pipeline import calibration
from compress.pipeline.events import Event
from compress.pipeline.plan import ModulePlan
from compress.pipeline.sizes import rows_at_once
from compress.pipeline.spill import HiddenStates
from compress.pipeline.stream import stream_unit
from compress.pipeline.work import (
    Work,
    block_tensors,
    copy_tensors,
    finish_unit,
    layer_record,
    outside_tensors,
    read_weight,
    store,
)
from compress.report.schema import Layer

# Hessians held at once; a block with more (a wide mixture) is observed in several forwards.
HESSIAN_BYTES = 2 << 30
EMBED = "embed"
EXPERTS_IN = "experts.in"  # every expert's input when all tokens go to all experts

OnBatch = Callable[[Tensor, Tensor | None, BlockContext, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """The calibration set, `rows` rows at a time. ids: int64 [n, length]; mask: bool or None."""

    ids: Tensor
    mask: Tensor | None
    skeleton: Skeleton
    rows: int

    def __iter__(self) -> Iterator[tuple[int, int]]:
        n = self.ids.shape[0]
        return ((start, min(start + self.rows, n)) for start in range(0, n, self.rows))

    def forward(self, source: HiddenStates, on_batch: OnBatch) -> None:
        """Call on_batch(hidden, mask, context, start) for every batch of stored hidden states."""
        for start, stop in self:
            mask = None if self.mask is None else self.mask[start:stop]
            context = self.skeleton.context(self.ids[start:stop], mask)
            hidden = source.read(start, stop).to(self.skeleton.device)
            on_batch(hidden, mask, context, start)


def calibrate(work: Work, folder: Path) -> None:
    """Quantize all blocks in order; units that the journal has are skipped."""
    spec = work.plan.spec
    config = work.plan.recipe.calibration
    assert config is not None, "the recipe parser asks for calibration where a stage needs it"
    skeleton = Skeleton(work.checkpoint.config, spec, dtype=work.dtype, device=work.device)
    if calibration.UNIT not in work.journal.units:
        began = time.perf_counter()
        summary = calibration.prepare(config, work.weights, skeleton, folder)
        work.journal.record(calibration.UNIT, summary)
        work.progress(Event("calibrate", "tokens", 1, 1, time.perf_counter() - began))
    ids, mask = calibration.reload(folder)
    shape = (ids.shape[0], ids.shape[1], spec.hidden)
    spills = [HiddenStates(folder / f"hidden.{i}", shape, work.dtype) for i in (0, 1)]
    rows = rows_at_once(shape, work.dtype, config.spill_bytes)
    _all_units(work, Batches(ids, mask, skeleton, rows), spills)


def _all_units(work: Work, batches: Batches, spills: list[HiddenStates]) -> None:
    """Everything outside the blocks, the embedded tokens, then block after block."""
    blocks = work.plan.spec.blocks
    steps: list[tuple[str, Callable[[], None]]] = [
        ("outside", lambda: stream_unit(work, "outside", None, outside_tensors(work))),
        (EMBED, lambda: _embed(work, batches, spills[0])),
    ]
    for block in blocks:
        last = block.index == len(blocks) - 1
        source, target = spills[block.index % 2], spills[(block.index + 1) % 2]
        # Bound now: the loop's names move on before the step runs.
        steps.append(
            (
                f"block {block.index}",
                lambda b=block, s=source, t=None if last else target: _block(work, batches, b, s, t),
            )
        )
    for position, (unit, step) in enumerate(steps):
        if unit in work.journal.units:
            continue
        began = time.perf_counter()
        step()
        spent = time.perf_counter() - began
        work.progress(Event("quantize", unit, position + 1, len(steps), spent))


def _embed(work: Work, batches: Batches, target: HiddenStates) -> None:
    for start, stop in batches:
        mask = None if batches.mask is None else batches.mask[start:stop]
        hidden = batches.skeleton.embed(work.weights, batches.ids[start:stop], mask)
        target.write(start, hidden)
    target.flush()
    work.journal.record(EMBED, [])


def _block(
    work: Work,
    batches: Batches,
    spec: BlockSpec,
    source: HiddenStates,
    target: HiddenStates | None,
) -> None:
    """Observe, quantize and write one block; leave its outputs in `target`; record it."""
    module = batches.skeleton.load_block(work.weights, spec.index)
    planned = work.planned(spec.index)
    copy_tensors(work, [name for name in block_tensors(spec) if name not in planned])
    layers: dict[str, Layer] = {}
    modules = _by_what_they_read(work, batches, module, spec, list(planned.values()), source)
    for members in _observation_rounds(work, modules):
        stats = _observe(work, batches, module, spec, members, source)
        for key, same_input in _by_input(members):
            for layer in _solve(work, module, same_input, stats.pop(key)):
                layers[layer.name] = layer
    if target is not None:
        _run_on(batches, module, spec, source, target)
    finish_unit(
        work,
        f"block {spec.index}",
        block_tensors(spec),
        [layers[m.linear.name] for m in planned.values()],
    )


def _run_on(
    batches: Batches, module: nn.Module, spec: BlockSpec, source: HiddenStates, target: HiddenStates
) -> None:
    def write(hidden: Tensor, mask: Tensor | None, context: BlockContext, start: int) -> None:
        target.write(start, batches.skeleton.run_block(module, spec.index, hidden, context))

    batches.forward(source, write)
    target.flush()


def _by_what_they_read(
    work: Work,
    batches: Batches,
    module: nn.Module,
    spec: BlockSpec,
    modules: list[ModulePlan],
    source: HiddenStates,
) -> list[ModulePlan]:
    """The modules with their shared-input keys as this run will observe them.

    A decoder in no table is asked by one small forward; experts that all see every token read
    one and the same input.
    """
    if work.plan.spec.family == "generic":
        context = batches.skeleton.context(batches.ids[:1], None)
        hidden = source.read(0, 1).to(work.device)
        linears = regroup(
            module,
            [m.linear for m in modules],
            lambda: batches.skeleton.run_block(module, spec.index, hidden, context),
        )
        return [replace(m, linear=x) for m, x in zip(modules, linears, strict=True)]
    if not _shows_all_tokens(work, modules):
        return modules
    for views in expert_views(module):
        views.all_tokens = True
    return [
        replace(m, linear=replace(m.linear, shared_input=EXPERTS_IN)) if _reads_block(m) else m
        for m in modules
    ]


def _reads_block(m: ModulePlan) -> bool:
    return m.linear.expert is not None and m.linear.role in ("gate", "up")


def _shows_all_tokens(work: Work, modules: list[ModulePlan]) -> bool:
    """Whether any stage on these experts asks for every token (the forward is one for all)."""
    experts = [m for m in modules if m.linear.expert is not None]
    return any(getattr(_config(work, m), "experts", "routed") == "all" for m in experts)


def _observation_rounds(work: Work, modules: list[ModulePlan]) -> list[list[ModulePlan]]:
    """Modules to observe together: as many as HESSIAN_BYTES allow, or input by input for
    true-sequential stages."""
    one_by_one = any(getattr(_config(work, m), "true_sequential", False) for m in modules)
    rounds: list[list[ModulePlan]] = []
    held = HESSIAN_BYTES
    for _, members in _by_input(modules):
        size = 4 * members[0].linear.shape[1] ** 2
        if one_by_one or held + size > HESSIAN_BYTES:
            rounds.append([])
            held = 0
        rounds[-1] += members
        held += size
    return rounds


def _config(work: Work, module: ModulePlan) -> object:
    return work.plan.recipe.stages[module.stage].config


def _by_input(modules: list[ModulePlan]) -> list[tuple[str, list[ModulePlan]]]:
    """(key, modules) by shared input, in the order the block computes them."""
    keys = dict.fromkeys(m.linear.shared_input for m in modules)
    return [(key, [m for m in modules if m.linear.shared_input == key]) for key in keys]


def _observe(
    work: Work,
    batches: Batches,
    module: nn.Module,
    spec: BlockSpec,
    modules: list[ModulePlan],
    source: HiddenStates,
) -> dict[str, Stats]:
    """Hessians of the modules' inputs over the whole calibration set, by shared input."""
    linears: list[LinearSpec] = [m.linear for m in modules]
    grams = {
        x.shared_input: GramAccumulator.create(x.shared_input, x.shape[1], device=work.device)
        for x in linears
    }

    def on_batch(hidden: Tensor, mask: Tensor | None, context: BlockContext, start: int) -> None:
        collect(
            module,
            linears,
            lambda: batches.skeleton.run_block(module, spec.index, hidden, context),
            lambda key, x: grams[key].add(x),
            mask=mask,
            stop_after_last=True,
        )

    batches.forward(source, on_batch)
    return {key: gram.stats() for key, gram in grams.items()}


def _solve(
    work: Work, module: nn.Module, members: list[ModulePlan], stats: Stats
) -> Iterator[Layer]:
    """Quantize the layers of one shared input, write them and set them in the block."""
    for (stage_index, scheme), same in groupby(members, key=lambda m: (m.stage, m.scheme)):
        stage = work.plan.recipe.stages[stage_index]
        group = list(same)
        weights = [read_weight(work, m) for m in group]
        is_expert = group[0].linear.expert is not None
        outcomes = METHODS[stage.method].quantize(
            [w.to(work.device) for w in weights],
            scheme,
            stage.config,
            scale_dtype=weights[0].dtype,
            hessian=stats.hessian,
            expert_tokens=stats.tokens if is_expert else None,
        )
        for m, outcome in zip(group, outcomes, strict=True):
            set_linear_weight(module, m.linear, outcome.quantized.dequantize(work.dtype))
            store(work, m, outcome.quantized)
            yield layer_record(
                m,
                error=outcome.error,
                method=outcome.method,
                tokens=stats.tokens,
                damping=outcome.damping,
                kept=outcome.kept,
            )
