"""Check a written checkpoint against what was meant to be written, before it is published.

A second reading by other means: names, dtypes and shapes from the headers on disk, scales by value,
the quantization_config as a loader would match it. Problems come back as lines; an empty list
means that the checkpoint keeps its promises.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from compress.arch.spec import DecoderSpec
from compress.checkpoint.header import TensorInfo
from compress.checkpoint.layout import Entry
from compress.checkpoint.reader import Checkpoint
from compress.formats import (
    bitsandbytes,
    bitsandbytes_validate,
    compressed_tensors,
    dense,
    kv_cache,
)
from compress.formats.detect import detect
from compress.formats.names import module_of
from compress.formats.scheme_map import SchemeMap, parse
from compress.quant.scheme import ActivationScheme, QuantScheme

_LAYOUTS = {x.NAME: x.layout for x in (compressed_tensors, bitsandbytes, dense)}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a checkpoint should hold.

    source: tensors of the original. schemes: of every quantized tensor, by its original name.
    fmt: a key of FORMATS. with_g_idx: tensors that carry a g_idx. kv_cache: scheme of the
    key/value cache whose scales are stored, kv_dtype their dtype code.
    """

    source: Mapping[str, TensorInfo]
    spec: DecoderSpec
    schemes: Mapping[str, QuantScheme]
    fmt: str
    with_g_idx: frozenset[str] = frozenset()
    kv_cache: ActivationScheme | None = None
    kv_dtype: str = "BF16"

    def entries(self) -> list[Entry]:
        """Name, dtype code and shape of every tensor of the result, in the source's order."""
        linears = {linear.tensor: linear for linear in self.spec.all_linears()}
        layout = _LAYOUTS[self.fmt]
        found: list[Entry] = []
        for name, info in self.source.items():
            if name not in self.schemes:
                found.append((name, info.dtype, info.shape))
                continue
            linear = linears[name]
            found += layout(
                name,
                linear.shape,
                self.schemes[name],
                info.dtype,
                act_order=name in self.with_g_idx,
                transposed=linear.transposed,
            )
        if self.kv_cache is not None:
            found += kv_cache.kv_layout(self.spec, self.kv_dtype)
        return found


def validate(checkpoint: Checkpoint, expected: Expected) -> list[str]:
    """Problems of a written checkpoint, one line each; none when it is as expected.

    Checked: every source tensor is there under its own name or as the parts of its scheme and
    nothing else is; dtypes and shapes; scales finite and positive; weight_shape and g_idx values;
    what quantization_config says of every linear, and that fused ones (q/k/v; gate/up) agree.
    """
    problems = list(_coverage(checkpoint, expected.entries()))
    if problems:
        return problems  # values of missing or misshapen tensors cannot be read
    if expected.fmt == bitsandbytes.NAME:
        spec, schemes, source = expected.spec, expected.schemes, expected.source
        return list(bitsandbytes_validate.problems(checkpoint, spec, schemes, source))
    problems += _values(checkpoint, expected)
    return problems + list(_config(checkpoint, expected))


def _coverage(checkpoint: Checkpoint, entries: list[Entry]) -> Iterator[str]:
    names = {name for name, _, _ in entries}
    for name in checkpoint.tensors:
        if name not in names:
            yield f"tensor {name} was written but belongs to nothing"
    for name, dtype, shape in entries:
        info = checkpoint.tensors.get(name)
        if info is None:
            yield f"tensor {name} is missing"
        elif (info.dtype, info.shape) != (dtype, shape):
            yield (
                f"tensor {name} is {info.dtype} {list(info.shape)} instead of {dtype} {list(shape)}"
            )


def _values(checkpoint: Checkpoint, expected: Expected) -> Iterator[str]:
    if expected.fmt == dense.NAME:
        return
    linears = {linear.tensor: linear for linear in expected.spec.all_linears()}
    for name, scheme in expected.schemes.items():
        module, shape = module_of(name), linears[name].shape
        yield from _scales(checkpoint, module, scheme)
        if compressed_tensors.is_packed(scheme):
            stored = tuple(int(v) for v in checkpoint.read(f"{module}.weight_shape"))
            if stored != shape:
                yield f"tensor {module}.weight_shape holds {list(stored)}, not {list(shape)}"
        if name in expected.with_g_idx:
            g_idx = checkpoint.read(f"{module}.weight_g_idx")
            if int(g_idx.min()) < 0 or int(g_idx.max()) >= scheme.groups(shape[1]):
                yield f"tensor {module}.weight_g_idx names a group that has no scale"
    yield from _global_scales(checkpoint, expected)
    if expected.kv_cache is not None:
        for name, _, _ in kv_cache.kv_layout(expected.spec, expected.kv_dtype):
            yield from _positive(checkpoint, name)


def _scales(checkpoint: Checkpoint, module: str, scheme: QuantScheme) -> Iterator[str]:
    # Below NVFP4's global scale a group of tiny weights may have scale 0.
    yield from _positive(checkpoint, f"{module}.weight_scale", zero=scheme.is_fp4)
    if scheme.is_fp4:
        yield from _positive(checkpoint, f"{module}.weight_global_scale")
    if compressed_tensors.is_static(scheme.activation):
        yield from _positive(checkpoint, f"{module}.input_scale")


def _positive(checkpoint: Checkpoint, name: str, *, zero: bool = False) -> Iterator[str]:
    scale = checkpoint.read(name).float()
    least = scale >= 0 if zero else scale > 0
    if not bool(torch.isfinite(scale).all() & least.all()):
        yield f"tensor {name} has scales that are not finite and positive"


def _global_scales(checkpoint: Checkpoint, expected: Expected) -> Iterator[str]:
    """Runtimes keep one global scale for the matrix that they fuse linears into."""
    fused: dict[tuple[int, str, int | None], float] = {}
    for block in expected.spec.blocks:
        for linear in block.linears:
            scheme = expected.schemes.get(linear.tensor)
            if scheme is None or not scheme.is_fp4 or linear.fused is None:
                continue
            scale = float(checkpoint.read(f"{linear.name}.weight_global_scale"))
            if fused.setdefault((block.index, linear.fused, linear.expert), scale) != scale:
                yield (
                    f"tensor {linear.name}.weight_global_scale is not that of the linears which"
                    " runtimes fuse it with"
                )


def _config(checkpoint: Checkpoint, expected: Expected) -> Iterator[str]:
    method = detect(checkpoint.config, ())
    anything = bool(expected.schemes) or expected.kv_cache is not None
    quantizes = anything and expected.fmt != dense.NAME
    if not quantizes:
        if method is not None:
            yield f"config.json names the quantization {method!r} but every weight is dense"
        return
    if method != compressed_tensors.NAME:
        yield f"config.json names the quantization {method!r}, not {compressed_tensors.NAME!r}"
        return
    schemes = parse(checkpoint.config)
    fused: dict[tuple[int, str], QuantScheme | None] = {}
    for block in expected.spec.blocks:
        for linear in block.linears:
            want = expected.schemes.get(linear.tensor)
            got = schemes.scheme(linear.name)
            if got != want:
                yield f"{linear.name}: quantization_config says {_say(got)}, stored is {_say(want)}"
            if linear.fused is None:
                continue
            other = fused.setdefault((block.index, linear.fused), want)
            if other != want:
                yield (
                    f"{linear.name} is {_say(want)} while another part of the matrix that runtimes"
                    f" fuse it into is {_say(other)}; vLLM refuses that"
                )
    yield from _head(schemes, expected)
    if schemes.kv_cache != expected.kv_cache:
        yield "quantization_config.kv_cache_scheme is not that of the scales which are stored"


def _head(schemes: SchemeMap, expected: Expected) -> Iterator[str]:
    head = expected.spec.head_linear()
    if head is None:
        if schemes.scheme("lm_head") is not None:
            yield "lm_head: quantization_config does not ignore it, but it is tied to the embedding"
        return
    got, want = schemes.scheme(head.name), expected.schemes.get(head.tensor)
    if got != want:
        yield f"{head.name}: quantization_config says {_say(got)}, stored is {_say(want)}"


def _say(scheme: QuantScheme | None) -> str:
    return "not quantized" if scheme is None else scheme.describe()
