"""The plan: what a recipe will do to a checkpoint, known before any work.

Sizes of the safetensors files are exact (the writer lays them out before the first byte); time and
memory are estimates that the report later sets beside what was measured.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec, LinearSpec
from compress.checkpoint import Checkpoint, ShardLayout, plan_shards
from compress.checkpoint.layout import nbytes
from compress.errors import CheckpointError, RecipeError
from compress.formats import FORMATS, Verdict, detect, runtimes
from compress.methods import METHODS
from compress.pipeline.estimate import Estimate, Job, estimate
from compress.quant.scheme import QuantScheme
from compress.recipe import Recipe
from compress.recipe.matching import assign

HEAD_ROLE = "head"


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One linear that will be quantized, by which stage of the recipe, and its bytes on disk."""

    linear: LinearSpec
    block: int | None
    stage: int
    method: str
    scheme: QuantScheme
    g_idx: bool
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """A linear that stays as it is, and why."""

    linear: LinearSpec
    block: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before work starts.

    tensors: for every tensor of the source, the (name, dtype code, shape) it becomes, in order.
    tensor_parallel: for 2, 4 and 8 shards the reasons against it; empty means it divides.
    """

    recipe: Recipe
    spec: DecoderSpec
    format: str
    modules: tuple[ModulePlan, ...]
    skipped: tuple[Skipped, ...]
    tensors: Mapping[str, tuple[tuple[str, str, tuple[int, ...]], ...]]
    shards: ShardLayout
    source_bytes: int
    estimate: Estimate
    tensor_parallel: Mapping[int, tuple[str, ...]]
    runtimes: tuple[Verdict, ...]
    warnings: tuple[str, ...]

    @property
    def needs_calibration(self) -> bool:
        return any(
            METHODS[stage.method].needs_calibration(stage.config) for stage in self.recipe.stages
        )

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
            "estimate": asdict(self.estimate),
            "modules": [_module_json(m) for m in self.modules],
            "skipped": [{"name": s.linear.name, "reason": s.reason} for s in self.skipped],
            "copied_tensors": list(self.spec.copied),
            "unrecognised": [name for b in self.spec.blocks for name in b.unrecognised],
            "tensor_parallel": {str(n): list(why) for n, why in self.tensor_parallel.items()},
            "runtimes": [r._asdict() for r in self.runtimes],
            "warnings": list(self.warnings),
        }


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
    found = detect(checkpoint.config, checkpoint.tensors)
    if found is not None:
        raise CheckpointError(
            f"{checkpoint.path} is already quantized ({found}); give the original checkpoint"
        )
    spec = describe(checkpoint.config, checkpoint.shapes)
    fmt = recipe.output.format if recipe.output.format != "auto" else "compressed-tensors"
    candidates = [*_block_linears(spec), *_head(checkpoint, spec)]
    assigned = assign(recipe.stages, [linear for linear, _ in candidates])
    modules, skipped = [], []
    for linear, block in candidates:
        stage = assigned.stage_of.get(linear.name)
        if stage is None:
            skipped.append(Skipped(linear, block, assigned.reason_of[linear.name]))
        else:
            modules.append(_module(recipe, stage, linear, block, checkpoint, fmt))
    if not modules:
        raise RecipeError(f"recipe {recipe.name!r} quantizes no layer of {checkpoint.path}")
    _check_groups(recipe, modules)
    _check_fused(modules, skipped)
    tensors = _output_tensors(checkpoint, modules, fmt)
    shards = plan_shards([t for group in tensors.values() for t in group], recipe.output.shard_size)
    calibrated = any(METHODS[s.method].needs_calibration(s.config) for s in recipe.stages)
    job = Job(
        checkpoint,
        spec,
        [(m.linear, m.scheme) for m in modules],
        recipe.calibration if calibrated else None,
        dtype,
    )
    return Plan(
        recipe=recipe,
        spec=spec,
        format=fmt,
        modules=tuple(modules),
        skipped=tuple(skipped),
        tensors=tensors,
        shards=shards,
        source_bytes=checkpoint.nbytes,
        estimate=estimate(job),
        tensor_parallel={n: _against_parallel(n, spec, modules) for n in (2, 4, 8)},
        runtimes=tuple(
            runtimes(
                fmt,
                {m.linear.tensor: m.scheme for m in modules},
                spec,
                g_idx=any(m.g_idx for m in modules),
            )
        ),
        warnings=tuple(_warnings(spec)),
    )


def _block_linears(spec: DecoderSpec) -> Iterable[tuple[LinearSpec, int | None]]:
    return ((linear, block.index) for block in spec.blocks for linear in block.linears)


def _head(checkpoint: Checkpoint, spec: DecoderSpec) -> list[tuple[LinearSpec, int | None]]:
    """The output head as a linear of its own, where it has a tensor of its own."""
    if spec.head is None:
        return []
    n, k = checkpoint.shapes[spec.head]
    name = spec.head.removesuffix(".weight")
    return [(LinearSpec(name, spec.head, (n, k), HEAD_ROLE, HEAD_ROLE, name), None)]


def _module(
    recipe: Recipe,
    stage: int,
    linear: LinearSpec,
    block: int | None,
    checkpoint: Checkpoint,
    fmt: str,
) -> ModulePlan:
    chosen = recipe.stages[stage]
    method, config = chosen.method, chosen.config
    if block is None and METHODS[method].needs_calibration(config):
        raise RecipeError(
            f"{chosen.at('targets')}: {linear.name} is the output head, which {method} with"
            " calibration does not take; give it a stage of its own with method rtn"
        )
    g_idx = getattr(config, "act_order", "none") == "group"
    if g_idx and chosen.scheme.granularity != "group":
        raise RecipeError(
            f"{chosen.at('act_order')}: 'group' needs granularity 'group', not"
            f" {chosen.scheme.granularity!r}; use 'static'"
        )
    info = checkpoint.tensors[linear.tensor]
    stored = _stored(linear, chosen.scheme, fmt, info.dtype, g_idx)
    size = sum(nbytes(entry) for entry in stored)
    return ModulePlan(linear, block, stage, method, chosen.scheme, g_idx, info.nbytes, size)


def _stored(
    linear: LinearSpec, scheme: QuantScheme, fmt: str, dtype: str, g_idx: bool
) -> list[tuple[str, str, tuple[int, ...]]]:
    return FORMATS[fmt].layout(
        linear.tensor,
        linear.shape,
        scheme,
        dtype,
        act_order=g_idx,
        transposed=linear.transposed,
    )


def _check_groups(recipe: Recipe, modules: Iterable[ModulePlan]) -> None:
    bad = [
        m for m in modules if m.linear.shape[1] % m.scheme.columns_per_scale(m.linear.shape[1])
    ]
    if not bad:
        return
    first = bad[0]
    width, size = first.linear.shape[1], first.scheme.group_size
    divisors = [g for g in range(1, 257) if width % g == 0]
    near = sorted(sorted(divisors, key=lambda g: abs(g - size))[:4])
    more = f" (and {len(bad) - 1} more layers)" if len(bad) > 1 else ""
    raise RecipeError(
        f"{recipe.stages[first.stage].at('group_size')}: {first.linear.name} has {width} input columns, not a"
        f" multiple of {size}{more}; use group_size {', '.join(map(str, near))}"
        " or granularity: channel"
    )


def _check_fused(modules: Iterable[ModulePlan], skipped: Iterable[Skipped]) -> None:
    """Layers that serving runtimes merge into one matrix must be stored alike."""
    schemes: dict[tuple[int | None, str, int | None], dict[str, str]] = {}
    for m in modules:
        if m.linear.fused:
            key = (m.block, m.linear.fused, m.linear.expert)
            schemes.setdefault(key, {})[m.linear.name] = m.scheme.describe()
    for s in skipped:
        if s.linear.fused:
            key = (s.block, s.linear.fused, s.linear.expert)
            schemes.setdefault(key, {})[s.linear.name] = "unquantized"
    for members in schemes.values():
        if len(set(members.values())) > 1:
            shown = ", ".join(f"{name} {scheme}" for name, scheme in members.items())
            raise RecipeError(
                f"stages: {shown}; runtimes merge these into one matrix, so give them one scheme"
            )


def _output_tensors(
    checkpoint: Checkpoint, modules: Iterable[ModulePlan], fmt: str
) -> dict[str, tuple[tuple[str, str, tuple[int, ...]], ...]]:
    planned = {m.linear.tensor: m for m in modules}
    out = {}
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


def _against_parallel(n: int, spec: DecoderSpec, modules: Iterable[ModulePlan]) -> tuple[str, ...]:
    """Why the result cannot be split over n devices without padding."""
    reasons: dict[str, str] = {}
    if spec.heads % n:
        reasons["heads"] = f"{spec.heads} heads do not divide by {n}"
    for m in modules:
        rows, columns = m.linear.shape
        role = m.linear.role
        if role in ("o", "down"):
            step = m.scheme.columns_per_scale(columns)
            if columns % n:
                reasons[role] = f"{role}: {columns} columns do not divide by {n}"
            elif m.scheme.granularity == "group" and (columns // n) % step:
                reasons[role] = f"{role}: {columns // n} columns a shard are no multiple of {step}"
        elif rows % n:
            reasons[role] = f"{role}: {rows} rows do not divide by {n}"
    return tuple(reasons.values())


def _warnings(spec: DecoderSpec) -> Iterable[str]:
    if spec.family == "generic":
        yield (
            f"model type {spec.model_type!r} is in no architecture table: layers were found by"
            " name and shape"
        )
    unrecognised = [name for block in spec.blocks for name in block.unrecognised]
    if unrecognised:
        yield f"copied as they are, not recognised: {', '.join(unrecognised[:6])}" + (
            f" and {len(unrecognised) - 6} more" if len(unrecognised) > 6 else ""
        )
