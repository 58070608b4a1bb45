"""The plan: what a recipe will do to a checkpoint, known before any work.

Sizes of the safetensors files are exact (the writer lays them out before the first byte); time and
memory are estimates that the report later sets beside what was measured.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec, LinearSpec
from compress.checkpoint import Checkpoint, ShardLayout, plan_shards
from compress.checkpoint.shards.dtype_codes import PLAIN_DTYPES
from compress.checkpoint.shards.layout import Entry, nbytes
from compress.errors import CheckpointError, RecipeError
from compress.formats import FORMATS, Verdict
from compress.formats.runtimes.judge import runtimes
from compress.methods import METHODS
from compress.plan import cache_scales, checks
from compress.plan.budget import BudgetChoice
from compress.plan.estimate import Estimate, estimate
from compress.plan.fold_pairs import check_pairs
from compress.plan.fused import check_fused
from compress.plan.layers import ModulePlan, Skipped, calibrated_head
from compress.plan.lengths import cap_defaults
from compress.plan.memory_needs import RunSize
from compress.plan.output_format import check_config, check_experts, choose_format, notes
from compress.plan.room import UNKNOWN, Room
from compress.plan.unlisted import opened
from compress.quant.scheme import ActivationScheme, QuantScheme
from compress.recipe import Recipe
from compress.recipe.matching import assign
from compress.recipe.placing import placed


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before work starts.

    tensors: for every tensor of the source, the entries (name, dtype code, shape) it becomes.
    tensor_parallel: for 2, 4 and 8 shards the reasons against it; empty means it divides.
    kv_bytes_per_token: of keys and values in a runtime's cache, for the source and for the result.
    budget: for a recipe with a target, what was chosen by it, or that nothing is yet.
    run_size: what the estimate is of. room: memory that the run may have.
    problems: what would stop a run that was started now, as `make_plan` found it.
    """

    recipe: Recipe
    spec: DecoderSpec
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
    kv_bytes_per_token: tuple[int, int]
    problems: tuple[str, ...] = ()
    budget: BudgetChoice | None = None
    room: Room = UNKNOWN

    @property
    def kv_cache(self) -> ActivationScheme | None:
        """How runtimes shall store keys and values, None for as they are."""
        return cache_scales.scheme(self.recipe)

    @property
    def needs_calibration(self) -> bool:
        return _calibrated(self.recipe)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over weights of the quantized linears, scales and zeros included."""
        weights = sum(m.linear.shape[0] * m.linear.shape[1] for m in self.modules)
        return 8 * sum(m.bytes_after for m in self.modules) / weights

    def to_json(self) -> dict[str, Any]:
        """Plain data for `plan --json`."""
        return {
            "recipe": self.recipe.name,
            "family": self.spec.family,
            "model_type": self.spec.model_type,
            "format": self.format,
            "source_bytes": self.source_bytes,
            "result_bytes": self.shards.total_bytes,
            "shards": {file.name: file.size for file in self.shards.files},
            "bits_per_weight": self.bits_per_weight,
            "source_kv_bytes_per_token": self.kv_bytes_per_token[0],
            "result_kv_bytes_per_token": self.kv_bytes_per_token[1],
            "budget": None if self.budget is None else self.budget.to_json(),
            "estimate": self.estimate.to_json(),
            "memory": {"free_bytes": self.room.bytes, "assumed": self.room.assumed},
            "modules": [_module_json(m) for m in self.modules],
            "skipped": [{"name": s.linear.name, "reason": s.reason} for s in self.skipped],
            "copied_tensors": list(self.spec.copied),
            "unrecognised": [name for b in self.spec.blocks for name in b.unrecognised],
            "tensor_parallel": {str(n): list(why) for n, why in self.tensor_parallel.items()},
            "runtimes": [r._asdict() for r in self.runtimes],
            "warnings": list(self.warnings),
            "problems": list(self.problems),
        }


def _calibrated(recipe: Recipe) -> bool:
    if recipe.kv_cache is not None:
        return True
    return any(METHODS[s.method].needs_calibration(s.config, s.scheme) for s in recipe.stages)


def _module_json(m: ModulePlan) -> dict[str, Any]:
    return {
        "name": m.linear.name,
        "role": m.linear.role,
        "shape": list(m.linear.shape),
        "method": m.method,
        "scheme": m.scheme.describe(),
        "bytes_before": m.bytes_before,
        "bytes_after": m.bytes_after,
    }


def build_plan(recipe: Recipe, checkpoint: Checkpoint, *, dtype: torch.dtype) -> Plan:
    """Plan of a recipe for a checkpoint; refuses what cannot work, with the place and a remedy.

    dtype: of the calibrated passes, for the estimate.
    """
    spec = describe(checkpoint.config, checkpoint.shapes)
    recipe, shortened = cap_defaults(recipe, spec.context)
    fmt = choose_format(recipe)
    modules, skipped = _assign(recipe, spec, checkpoint, fmt)
    checks.check_embedding(recipe, spec, modules)
    checks.check_groups(recipe, modules)
    check_fused(recipe, modules, skipped)
    check_pairs(recipe, spec, modules)
    check_experts(recipe, modules, fmt)
    streamed = _calibrated(recipe) or recipe.evaluation is not None
    linears = [m.linear for m in modules]
    spec = opened(checkpoint.config, spec, linears, fmt, streamed=streamed)
    with placed(recipe, "output.format"):
        check_config(fmt, spec, checkpoint.shapes, modules)
    tensors = _output_tensors(checkpoint, modules, fmt)
    if recipe.kv_cache is not None:
        tensors = cache_scales.reserve(recipe, spec, checkpoint.main_dtype, tensors, fmt)
    shards = plan_shards([t for group in tensors.values() for t in group], recipe.output.shard_size)
    run_size = _run_size(recipe, checkpoint, spec, modules, dtype)
    return Plan(
        recipe=recipe,
        spec=spec,
        format=fmt,
        modules=tuple(modules),
        skipped=tuple(skipped),
        tensors=tensors,
        shards=shards,
        source_bytes=checkpoint.file_bytes,
        estimate=estimate(run_size),
        run_size=run_size,
        tensor_parallel={n: checks.why_not_parallel(n, spec, modules, fmt) for n in (2, 4, 8)},
        runtimes=_runtimes(fmt, spec, modules, cache_scales.scheme(recipe)),
        warnings=(*checks.warnings(checkpoint, spec), *shortened, *notes(modules, fmt)),
        kv_bytes_per_token=cache_scales.planned_bytes(recipe, spec, checkpoint),
    )


def _run_size(
    recipe: Recipe,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    modules: Iterable[ModulePlan],
    dtype: torch.dtype,
) -> RunSize:
    modules = list(modules)
    head = calibrated_head(recipe, modules)
    return RunSize(
        checkpoint,
        spec,
        [(m.linear, m.scheme) for m in modules],
        recipe.calibration if _calibrated(recipe) else None,
        dtype,
        None if head is None else head.linear,
        recipe.evaluation,
        exports=bool(recipe.export),
    )


def _runtimes(
    fmt: str, spec: DecoderSpec, modules: Iterable[ModulePlan], kv_cache: ActivationScheme | None
) -> tuple[Verdict, ...]:
    modules = list(modules)
    schemes = {m.linear.tensor: m.scheme for m in modules}
    g_idx = any(m.g_idx for m in modules)
    return tuple(runtimes(fmt, schemes, spec, g_idx=g_idx, kv_cache=kv_cache))


def _assign(
    recipe: Recipe, spec: DecoderSpec, checkpoint: Checkpoint, fmt: str
) -> tuple[list[ModulePlan], list[Skipped]]:
    """Every linear of the decoder: with the stage that takes it, or with why none does."""
    assigned = assign(recipe.stages, spec.all_linears())
    blocks = {linear.name: block.index for block in spec.blocks for linear in block.linears}
    modules, skipped = [], []
    for linear in spec.all_linears():
        stage, block = assigned.stage_of.get(linear.name), blocks.get(linear.name)
        if stage is None:
            skipped.append(Skipped(linear, block, assigned.reason_of[linear.name]))
        else:
            module = _module(recipe, stage, linear, block, checkpoint, fmt)
            modules.append(replace(module, folds=assigned.folds_of.get(linear.name, ())))
    return modules, skipped


def _module(
    recipe: Recipe,
    stage: int,
    linear: LinearSpec,
    block: int | None,
    checkpoint: Checkpoint,
    fmt: str,
) -> ModulePlan:
    chosen = recipe.stages[stage]
    method, config, scheme = chosen.method, chosen.config, chosen.scheme
    assert scheme is not None, "matching.assign gives a layer to a stage that says how it is stored"
    g_idx = METHODS[method].needs(config).g_idx
    if g_idx and scheme.granularity != "group":
        raise RecipeError(
            f"{chosen.at('act_order')}: 'group' needs granularity 'group', not"
            f" {scheme.granularity!r}; use 'static'"
        )
    info = checkpoint.tensors[linear.tensor]
    if info.dtype not in PLAIN_DTYPES:
        raise CheckpointError(
            f"tensor {linear.tensor} is stored as {info.dtype}; {', '.join(PLAIN_DTYPES)} can be"
            " quantized, so convert it or add the layer to ignore"
        )
    with placed(recipe, "output.format"):
        stored = _stored(linear, scheme, fmt, info.dtype, g_idx)
    size = sum(nbytes(entry) for entry in stored)
    return ModulePlan(linear, block, stage, method, scheme, g_idx, info.nbytes, size)


def _stored(
    linear: LinearSpec, scheme: QuantScheme, fmt: str, dtype: str, g_idx: bool
) -> list[Entry]:
    return FORMATS[fmt].layout(
        linear.tensor,
        linear.shape,
        scheme,
        dtype,
        act_order=g_idx,
        transposed=linear.transposed,
    )


def _output_tensors(
    checkpoint: Checkpoint, modules: Iterable[ModulePlan], fmt: str
) -> dict[str, tuple[Entry, ...]]:
    planned = {m.linear.tensor: m for m in modules}
    out: dict[str, tuple[Entry, ...]] = {}
    for name, info in checkpoint.tensors.items():
        m = planned.get(name)
        if m is None:
            out[name] = ((name, info.dtype, info.shape),)
        else:
            out[name] = tuple(_stored(m.linear, m.scheme, fmt, info.dtype, m.g_idx))
    written = Counter(t[0] for group in out.values() for t in group)
    clash = [name for name, n in written.items() if n > 1]
    if clash:
        raise CheckpointError(f"tensor {clash[0]} already exists in the source; cannot write it")
    return out
