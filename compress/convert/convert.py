"""From one quantized format to another, tensor by tensor, without calibration.

Codes and scales stay what they are; only how they lie in the files changes.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compress.byte_sizes import EXPECTED, byte_size
from compress.checkpoint import (
    Checkpoint,
    Output,
    ShardWriter,
    resolve_model,
    write_atomic,
)
from compress.checkpoint.detect import without_block
from compress.checkpoint.jsonfile import as_json
from compress.checkpoint.output.publishing import prepare, published
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.convert.plan import ExportPlan, format_name, plan_export
from compress.convert.report import ExportReport, build, card, write
from compress.errors import RecipeError
from compress.events import Event, Progress, silent
from compress.formats import open_weights
from compress.formats.scales import fit_scales
from compress.formats.storage import WeightStorage
from compress.formats.table import small_files
from compress.formats.validate import Expected, validate
from compress.passes.copying import copy
from compress.passes.units import OUTSIDE, shown
from compress.quant.tensor import QuantizedTensor

# Weights that are converted at once, so that reading, turning and writing overlap. Each of them
# holds about ten bytes a weight meanwhile.
WORKERS = 4
SAMPLES = 4  # weights that are read back and compared, of different schemes and shapes


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion may do. round_scales: let scales change that the format cannot hold
    exactly. shard_size: most bytes of one file, as "5GB"."""

    round_scales: bool = False
    shard_size: str = "5GB"


def make_export_plan(model: str | Path, to: str, options: Conversion) -> ExportPlan:
    """What `export` would write; raises as it does for what cannot be."""
    to, size = format_name(to), byte_size(options.shard_size)
    if size is None:
        raise RecipeError(f"--shard-size is {options.shard_size!r}; {EXPECTED}")
    checkpoint = Checkpoint.open(resolve_model(model))
    return plan_export(checkpoint, to, round_scales=options.round_scales, shard_bytes=size)


def dry_export(
    model: str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    options: Conversion | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """The report of an export that is not done; refuses all that an export into `out` would."""
    plan = make_export_plan(model, to, options or Conversion())
    if out is None:
        return build(plan, None)
    output = _prepare(plan, out, overwrite)
    return build(plan, output.out)


def export(
    model: str | Path,
    to: str,
    out: str | Path,
    *,
    options: Conversion | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the quantized checkpoint `model` in the format `to` (a key of CODECS) into `out`.

    Raises a CompressError for whatever the user can mend, before any byte is written where
    possible.
    """
    began = time.perf_counter()
    plan = make_export_plan(model, to, options or Conversion())
    output = _prepare(plan, out, overwrite)
    return published(output, lambda: _work(plan, output, began, progress or silent))


def _prepare(plan: ExportPlan, out: str | Path, overwrite: bool) -> Output:
    source, needed = plan.source.checkpoint.path, plan.shards.total_bytes
    return prepare(out, source, needed, overwrite=overwrite)


def _work(plan: ExportPlan, output: Output, began: float, progress: Progress) -> ExportReport:
    writer = ShardWriter.create(output.partial, plan.shards)
    with _workers() as pool:
        for i, unit in enumerate(units := list(_units(plan))):
            clock = time.perf_counter()
            list(pool.map(lambda name: _write(plan, writer, name), unit[1]))
            seconds = time.perf_counter() - clock
            progress(Event("export", shown(unit[0]), i + 1, len(units), seconds))
    _write_cache(plan, writer)
    writer.finish()
    report = build(plan, output.out, seconds=time.perf_counter() - began)
    _write_files(plan, report, output.partial)
    _check(plan, output.partial)
    return report


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """Threads that convert weights, with one thread each for torch: nothing here is large enough to
    gain from more, and waiting for each other costs them more than they share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(WORKERS, threads), "export") as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _units(plan: ExportPlan) -> Iterator[tuple[str, list[str]]]:
    """Tensors of the dense original: those outside the blocks, then each block's."""
    owner = {
        name: block.prefix
        for block in plan.source.spec.blocks
        for name in (*(tensor for tensor, _ in block.modules), *block.unrecognised)
    }
    places: dict[str, list[str]] = {OUTSIDE: []}
    for name in plan.original:
        places.setdefault(owner.get(name, OUTSIDE), []).append(name)
    yield from places.items()


def _write(plan: ExportPlan, writer: ShardWriter, name: str) -> None:
    """One tensor of the dense original, as the parts that the target has of it."""
    quantized = plan.source.quantized(name)
    if quantized is None:
        copy(plan.source.checkpoint, writer, [name])
        return
    written = fitted(plan, name, quantized)
    transposed = plan.source.transposed(name.removesuffix(".weight"))
    dtype = plan.original[name].dtype
    how = WeightStorage.of_tensor(name, written, dtype, transposed=transposed)
    for part, tensor in plan.target.encode(how, written).items():
        writer.write(part, tensor)


def fitted(plan: ExportPlan, name: str, tensor: QuantizedTensor) -> QuantizedTensor:
    """The weight `name` of the source with its scales in the target's dtype, and without zero
    points that the plan does without."""
    layer = plan.held.layers.get(name)
    if layer is not None and layer.scheme != tensor.scheme:
        tensor = replace(tensor, scheme=layer.scheme, zero=None)
    if plan.target.scale_dtype is None:
        return tensor
    # The plan has looked at all of them; what is rounded here was allowed.
    return fit_scales(tensor, TORCH_DTYPES[plan.target.scale_dtype], round_scales=True)


def _write_cache(plan: ExportPlan, writer: ShardWriter) -> None:
    if plan.held.kv_cache is None or plan.target.cache is None:
        return
    dtype = TORCH_DTYPES[plan.held.kv_dtype]
    for block in plan.source.spec.blocks:
        found = plan.source.cache(block)
        assert found is not None, "the plan looked for them"
        k, v = (inputs.scale for inputs in found)
        assert k is not None
        assert v is not None
        for name, scale in plan.target.cache.encode(block, k.to(dtype), v.to(dtype)).items():
            writer.write(name, scale)


def _write_files(plan: ExportPlan, report: ExportReport, partial: Path) -> None:
    source, config = plan.source.checkpoint, without_block(plan.source.checkpoint.config)
    for path in source.side_files():
        if path.name not in small_files():
            write_atomic(partial / path.name, source.small.read(path.name))
    if plan.config is not None:
        config["quantization_config"] = plan.config
        for name, follows in plan.target.files.items():
            write_atomic(partial / name, as_json(follows(plan.config)))
    write_atomic(partial / "config.json", as_json(config))
    write_atomic(partial / "README.md", card(report))
    write(report, partial)


def _check(plan: ExportPlan, partial: Path) -> None:
    """What was written is what was planned, and samples of it are what was read."""
    written = Checkpoint.open(partial)
    expected = Expected(
        source=plan.original,
        spec=plan.source.spec,
        schemes=plan.schemes,
        fmt=plan.target.name,
        with_g_idx=plan.held.with_g_idx,
        kv_cache=plan.held.kv_cache,
        kv_dtype=plan.held.kv_dtype,
    )
    problems = validate(written, expected) or list(_differences(plan, written))
    assert not problems, f"{partial} is not what was planned: {'; '.join(problems[:5])}"


def _differences(plan: ExportPlan, written: Checkpoint) -> Iterator[str]:
    result = open_weights(written, plan.source.spec)
    if not result.format.coded:
        return
    layers = plan.held.layers.items()
    kinds = {(x.scheme, x.linear.shape, x.reordered): name for name, x in layers}
    for name in list(kinds.values())[:SAMPLES]:
        before, after = plan.source.quantized(name), result.quantized(name)
        assert before is not None
        assert after is not None
        if not _same(fitted(plan, name, before), after):
            yield f"{name} does not read back as the source has it"


def _same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Equal bit for bit; zero points of 0 are as good as none."""
    pairs = [(a.codes, b.codes), (a.scale, b.scale), (a.column_groups(), b.column_groups())]
    if a.zero is not None or b.zero is not None:
        none = torch.zeros(a.scale.shape, dtype=torch.int8)
        pairs.append((none if a.zero is None else a.zero, none if b.zero is None else b.zero))
    if a.input_scale is not None and b.input_scale is not None:
        pairs.append((a.input_scale.reshape(-1), b.input_scale.reshape(-1)))
    alike = (a.input_scale is None) == (b.input_scale is None)
    # Of the global scale, which may be a reciprocal, one scale's steps tell.
    steps = torch.allclose(_global_step(a), _global_step(b), rtol=1e-6, atol=0)
    return alike and steps and all(_equal(x, y) for x, y in pairs)


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(_bits(x), _bits(y))


def _global_step(tensor: QuantizedTensor) -> torch.Tensor:
    """What NVFP4's scales are multiplied by: fp32 [1], 1 elsewhere."""
    if tensor.global_factor is not None:
        return tensor.global_factor.reshape(1)
    whole = tensor.global_scale
    return torch.ones(1) if whole is None else whole.reshape(1).reciprocal()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
