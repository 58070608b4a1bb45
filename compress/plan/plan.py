"""The plan: what a recipe will do to a checkpoint, known before any work.

Sizes of the safetensors files are exact (the writer lays them out before the first byte); time and
memory are estimates that the report later sets beside what was measured.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from compress.arch.cache_size import CacheSize
from compress.arch.spec import DecoderSpec
from compress.checkpoint import ShardLayout, plan_shards
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.layout import Entry
from compress.formats import Verdict
from compress.formats.runtimes import gguf_runtimes
from compress.formats.runtimes.attention_rules import with_attention
from compress.formats.runtimes.judge import runtimes
from compress.machine.device import Device
from compress.methods import METHODS
from compress.plan import cache_scales, checks
from compress.plan.budget import BudgetChoice
from compress.plan.estimate import Estimate, estimate
from compress.plan.layers import (
    ModulePlan,
    Skipped,
    calibrated_head,
    output_tensors,
)
from compress.plan.lengths import cap_defaults
from compress.plan.memory_needs import RunSize
from compress.plan.output_format import check_config, choose_format, notes
from compress.plan.passes import ROUNDING, EditedModel, PassPlan, plan_tuning
from compress.plan.room import UNKNOWN, Room
from compress.plan.training.teachers import NO_TEACHERS, Teachers
from compress.plan.unlisted import opened
from compress.plan.whole.file import NAME as GGUF
from compress.plan.whole.file import BlocksPlan, WholeFile, plan_whole, whole_stage
from compress.plan.whole.size import FileSize
from compress.quant.scheme import ActivationScheme
from compress.recipe import Recipe
from compress.recipe.placing import placed
from compress.recipe.reading.exports import any_rounds
from compress.recipe.seen_texts import calibrated_too

ONE_FILE = "a GGUF file is one; vLLM was not tried with it"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before work starts.

    spec: of the result. passes: what the run is made of, in order; the last one writes the result.
    tensors: for every tensor that the last pass reads, the entries (name, dtype code, shape) it
    becomes; as they are where no stage rounds.
    tensor_parallel: for 2, 4 and 8 shards the reasons against it; empty means it divides.
    caches: of keys and values in a runtime's cache, for the source and for the result.
    given: the recipe as it was read, with its targets. budget: for a recipe with a target, what was
    chosen by it, or that nothing is yet.
    run_size: what the estimate is of. room: memory that the run may have.
    problems: what would stop a run that was started now, as `make_plan` found it.
    bytes_range: least and most bytes of the result, as planned before any work, where sizes wait
    for a measurement; until they are chosen shards is that of the largest model.
    device: where the run would compute, as `make_plan` found it.
    teachers: other models that passes train by. notes: what edits say of what they leave.
    file: of a recipe that rounds the whole model into one file; modules is then empty.
    """

    recipe: Recipe
    spec: DecoderSpec
    passes: tuple[PassPlan, ...]
    format: str
    modules: tuple[ModulePlan, ...]
    skipped: tuple[Skipped, ...]
    tensors: Mapping[str, tuple[Entry, ...]]
    shards: ShardLayout
    source_bytes: int
    estimate: Estimate
    run_size: RunSize
    tensor_parallel: Mapping[int, tuple[str, ...]]
    runtimes: tuple[Verdict, ...]
    warnings: tuple[str, ...]
    caches: tuple[CacheSize, CacheSize]
    given: Recipe
    problems: tuple[str, ...] = ()
    budget: BudgetChoice | None = None
    room: Room = UNKNOWN
    bytes_range: tuple[int, int] | None = None
    device: Device = field(default_factory=lambda: Device("cpu"))
    teachers: Teachers = field(default_factory=lambda: NO_TEACHERS)
    notes: tuple[str, ...] = ()
    file: WholeFile | None = None

    @property
    def compressed(self) -> Sequence[ModulePlan | BlocksPlan]:
        """Every weight that is rounded."""
        return self.modules if self.file is None else self.file.modules

    @property
    def asked(self) -> Recipe:
        """What makes two runs the same: with the schemes that a target chose, where that is known
        before any work."""
        late = self.budget is not None or any(edit.is_open for edit in self.given.edits)
        return self.given if self.edits and late else self.recipe

    def __repr__(self) -> str:
        return str(_show().plan_line(self))

    def _repr_html_(self) -> str:
        return str(_show().plan_html(self))

    @property
    def is_open(self) -> bool:
        """Whether the choice of a target, or of an edit, waits for a measurement."""
        edits = any(edit.is_open for edit in self.recipe.edits)
        return edits or (self.budget is not None and self.budget.is_open)

    @property
    def kv_cache(self) -> ActivationScheme | None:
        """How runtimes shall store keys and values, None for as they are."""
        return cache_scales.scheme(self.recipe)

    @property
    def kv_bytes_per_token(self) -> tuple[int, int]:
        """Of `caches`, those of a token."""
        before, after = self.caches
        return before.token, after.token

    @property
    def needs_calibration(self) -> bool:
        """Whether the pass that rounds does."""
        return _calibrated(self.recipe)

    @property
    def looks_at_data(self) -> bool:
        """Whether any pass reads calibration data, or an export that rounds by it."""
        looks = self.needs_calibration or any(each.looks_at_data for each in self.passes)
        return looks or self.run_size.exported_by is not None

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over weights of the quantized linears, scales and zeros included; of all
        linears of the blocks where none is quantized."""
        if not self.compressed:
            kept = [self.result.tensors[x.tensor] for x in self.spec.linears()]
            return 8 * sum(x.nbytes for x in kept) / sum(x.numel for x in kept)
        weights = sum(m.linear.shape[0] * m.linear.shape[1] for m in self.compressed)
        return 8 * sum(m.bytes_after for m in self.compressed) / weights

    @property
    def source(self) -> Outline:
        """The model that the recipe was given."""
        return self.passes[0].source

    @property
    def result(self) -> Outline:
        """The model that comes out."""
        return self.passes[-1].result

    @property
    def edits(self) -> tuple[PassPlan, ...]:
        """The passes that change the model itself, before any layer is rounded."""
        return tuple(each for each in self.passes if each.stage is not None and not each.tunes)

    @property
    def rounding(self) -> PassPlan:
        """The pass of all stages that round; only of a recipe that has some."""
        return next(each for each in self.passes if each.stage is None)

    @property
    def tuning(self) -> tuple[PassPlan, ...]:
        """The passes that train what the stages that round have left."""
        return tuple(each for each in self.passes if each.tunes)

    @property
    def model(self) -> EditedModel:
        """What the plan was made of."""
        return EditedModel(self.source, self.edits, self.teachers)

    @property
    def rounded(self) -> Outline:
        """The model whose layers the stages round: the source, or what the edits make of it."""
        return self.model.rounded

    @property
    def head(self) -> ModulePlan | None:
        """The output head, where it waits for what the last block gives."""
        return calibrated_head(self.recipe, self.modules)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `plan --json`."""
        return {
            "recipe": self.recipe.name,
            "family": self.spec.family,
            "model_type": self.spec.model_type,
            "format": self.format,
            "source_bytes": self.source_bytes,
            "result_bytes": self.shards.total_bytes,
            "result_bytes_range": None if self.bytes_range is None else list(self.bytes_range),
            "shards": {file.name: file.size for file in self.shards.files},
            "bits_per_weight": self.bits_per_weight,
            "source_kv_bytes_per_token": self.kv_bytes_per_token[0],
            "result_kv_bytes_per_token": self.kv_bytes_per_token[1],
            "context": self.result.spec.context,
            "source_kv_bytes_of_context": self.caches[0].context,
            "result_kv_bytes_of_context": self.caches[1].context,
            "passes": [_pass_json(each) for each in self.passes],
            "budget": None if self.budget is None else self.budget.to_json(),
            "device": {"name": self.device.name, "why": self.device.why},
            "estimate": self.estimate.to_json(),
            "memory": {"free_bytes": self.room.bytes, "assumed": self.room.assumed},
            "modules": [_module_json(m) for m in self.compressed],
            "skipped": [{"name": s.linear.name, "reason": s.reason} for s in self.skipped],
            "copied_tensors": list(self.spec.copied),
            "unrecognised": [name for b in self.spec.blocks for name in b.unrecognised],
            "tensor_parallel": {str(n): list(why) for n, why in self.tensor_parallel.items()},
            "runtimes": [r._asdict() for r in self.runtimes],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "problems": list(self.problems),
        }


def _show() -> Any:
    """What shows a plan reads it; so it is found when it is asked for."""
    return import_module("compress.plan.notebook.show")


def _calibrated(recipe: Recipe) -> bool:
    if recipe.kv_cache is not None:
        return True
    return any(METHODS[s.method].needs_calibration(s.config, s.scheme) for s in recipe.stages)


def _pass_json(planned: PassPlan) -> dict[str, Any]:
    return {
        "name": planned.label,
        "params": planned.source.params,
        "source_bytes": planned.source.file_bytes,
        "result_bytes": planned.layout.total_bytes,
    }


def _module_json(m: ModulePlan | BlocksPlan) -> dict[str, Any]:
    return {
        "name": m.linear.name,
        "role": m.linear.role,
        "shape": list(m.linear.shape),
        "method": m.method,
        "scheme": m.how,
        "bytes_before": m.bytes_before,
        "bytes_after": m.bytes_after,
    }


def build_plan(recipe: Recipe, given: EditedModel, *, dtype: torch.dtype) -> Plan:
    """Plan of a recipe for a model; refuses what cannot work, with the place and a remedy.

    dtype: of the calibrated passes, for the estimate.
    """
    source, edits, model = given.source, given.edits, given.rounded
    spec = model.spec
    recipe, shortened = cap_defaults(recipe, spec.context)
    fmt = choose_format(recipe)
    stage = whole_stage(recipe)
    if stage is not None:
        return _whole_plan(recipe, given, plan_whole(recipe, stage, model, source), dtype)
    modules, skipped = checks.checked_layers(recipe, model, fmt)
    streamed = _calibrated(recipe) or recipe.evaluation is not None
    linears = [m.linear for m in modules]
    spec = opened(model.config, spec, linears, fmt, streamed=streamed)
    model = replace(model, spec=spec)
    with placed(recipe, "output.format"):
        check_config(fmt, spec, model.shapes, modules)
    tensors = output_tensors(model, modules, fmt)
    if recipe.kv_cache is not None:
        tensors = cache_scales.reserve(recipe, spec, model.main_dtype, tensors, fmt)
    passes = edits
    if recipe.stages:
        rounding = _rounding(recipe, model, tensors)
        passes = (*edits, rounding, *plan_tuning(recipe, given, rounding))
        checks.check_tuning(recipe, modules, fmt)
    run_size = _run_size(recipe, given, model, passes, modules, dtype)
    return Plan(
        recipe=recipe,
        spec=spec,
        passes=passes,
        format=fmt,
        modules=tuple(modules),
        skipped=tuple(skipped),
        tensors=tensors,
        shards=passes[-1].layout,
        source_bytes=source.file_bytes,
        estimate=estimate(run_size),
        run_size=run_size,
        tensor_parallel={n: checks.why_not_parallel(n, spec, modules, fmt) for n in (2, 4, 8)},
        runtimes=_runtimes(fmt, model, modules, cache_scales.scheme(recipe)),
        warnings=(
            *checks.warnings(model),
            *shortened,
            *calibrated_too(recipe),
            *notes(modules, fmt),
        ),
        caches=(cache_scales.dense_cache(source), cache_scales.planned_cache(recipe, model)),
        given=recipe,
        teachers=given.teachers,
        notes=tuple(line for each in edits for line in each.notes),
    )


def _whole_plan(recipe: Recipe, given: EditedModel, file: WholeFile, dtype: torch.dtype) -> Plan:
    """Plan of a recipe that rounds the whole model into one file."""
    model = given.rounded
    tensors, size = model.tensors, file.layout.total_bytes
    result = Outline(model.config, model.spec, tensors, size)
    rounding = PassPlan(ROUNDING, None, model, result, file.layout)
    passes = (*given.edits, rounding)
    run_size = replace(
        _run_size(recipe, given, model, passes, (), dtype),
        linears=[(m.linear, None) for m in file.modules],
        head=next((m.linear for m in file.modules if m.linear.role == "head"), None),
        file=FileSize(model.spec, file.rounded),
    )
    return Plan(
        recipe=recipe,
        spec=model.spec,
        passes=passes,
        format=GGUF,
        modules=(),
        skipped=file.skipped,
        tensors=file.tensors,
        shards=file.layout,
        source_bytes=given.source.file_bytes,
        estimate=estimate(run_size),
        run_size=run_size,
        tensor_parallel=dict.fromkeys((2, 4, 8), (ONE_FILE,)),
        runtimes=gguf_runtimes.verdicts(model.spec),
        warnings=(*checks.warnings(model), *calibrated_too(recipe)),
        caches=(cache_scales.dense_cache(given.source), cache_scales.planned_cache(recipe, model)),
        given=recipe,
        teachers=given.teachers,
        notes=(*(line for each in given.edits for line in each.notes), *file.notes),
        file=file,
    )


def _rounding(recipe: Recipe, model: Outline, tensors: Mapping[str, tuple[Entry, ...]]) -> PassPlan:
    """The pass of all stages that round. Its config.json is the model's until it is written."""
    entries = [entry for group in tensors.values() for entry in group]
    layout = plan_shards(entries, recipe.output.shard_size)
    result = Outline(model.config, model.spec, layout.tensors, layout.total_bytes)
    return PassPlan(ROUNDING, None, model, result, layout)


def _run_size(
    recipe: Recipe,
    given: EditedModel,
    model: Outline,
    passes: Sequence[PassPlan],
    modules: Sequence[ModulePlan],
    dtype: torch.dtype,
) -> RunSize:
    head = calibrated_head(recipe, modules)
    rounding = recipe.calibration if any_rounds(recipe.export) else None
    # A training draws rows of its own.
    looking = any(each.looks_at_data and not each.trains for each in passes)
    drawn = looking or rounding is not None
    return RunSize(
        model,
        model.spec,
        [(m.linear, m.scheme) for m in modules],
        recipe.calibration if _calibrated(recipe) else None,
        dtype,
        None if head is None else head.linear,
        recipe.evaluation,
        exports=bool(recipe.export),
        file=FileSize(model.spec)
        if any(x.to == GGUF and x.verify for x in recipe.export)
        else None,
        edits=list(given.sizes(passes, recipe.calibration, dtype)),
        drawn=recipe.calibration if drawn else None,
        exported_by=rounding,
    )


def _runtimes(
    fmt: str, model: Outline, modules: Iterable[ModulePlan], kv_cache: ActivationScheme | None
) -> tuple[Verdict, ...]:
    modules = list(modules)
    schemes = {m.linear.tensor: m.scheme for m in modules}
    g_idx = any(m.g_idx for m in modules)
    found = runtimes(fmt, schemes, model.spec, g_idx=g_idx, kv_cache=kv_cache)
    return tuple(with_attention(found, model.config, model.spec))
