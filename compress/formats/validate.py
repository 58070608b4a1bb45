"""Check a written checkpoint against what was meant to be written, before it is published.

A second reading by other means: names, dtypes and shapes from the headers on disk, scales by value,
the quantization_config as a loader would match it, and samples of the weights through the codec's
own reader. Problems come back as lines; an empty list means that the checkpoint keeps its promises.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.checkpoint.detect import detect
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.header import TensorInfo
from compress.checkpoint.shards.layout import Entry
from compress.errors import CheckpointError
from compress.formats import validate_outliers
from compress.formats.coded_weights import CodedWeights
from compress.formats.format import Reader
from compress.formats.names import module_of
from compress.formats.open_weights import open_coded
from compress.formats.scales import damage
from compress.formats.storage import WeightStorage
from compress.formats.table import FORMATS
from compress.quant.scheme import ActivationScheme, QuantScheme

GLOBAL_SCALES = ("weight_global_scale", "weight_scale_2")  # NVFP4's, by format


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
        layout = FORMATS[self.fmt].layout
        found: list[Entry] = []
        for name, info in self.source.items():
            if name not in self.schemes:
                found.append((name, info.dtype, info.shape))
                continue
            linear, scheme, act_order = linears[name], self.schemes[name], name in self.with_g_idx
            found += layout(
                WeightStorage.of_linear(linear, scheme, info.dtype, act_order=act_order)
            )
        return found + self.cache()

    def cache(self) -> list[Entry]:
        """Those of the key/value cache's scales."""
        places = FORMATS[self.fmt].cache
        if self.kv_cache is None or places is None:
            return []
        return places.layout(self.spec, self.kv_dtype)


def validate(checkpoint: Checkpoint, expected: Expected) -> list[str]:
    """Problems of a written checkpoint, one line each; none when it is as expected.

    Checked: every source tensor is there under its own name or as the parts of its scheme and
    nothing else is; dtypes and shapes; damaged scales; groups of columns; what
    quantization_config says of every linear, and that fused ones (q/k/v; gate/up) agree; one weight
    of every scheme and shape, as the codec reads it back.
    """
    problems = list(_coverage(checkpoint, expected.entries()))
    if problems:
        return problems  # values of missing or misshapen tensors cannot be read
    method, meant = detect(checkpoint.config, ()), FORMATS[expected.fmt].method
    if meant is None or not (expected.schemes or expected.kv_cache):
        if method is None:
            return []
        return [f"config.json names the quantization {method!r} but every weight is dense"]
    if method != meant:
        return [f"config.json names the quantization {method!r}, not {meant!r}"]
    try:
        weights = open_coded(checkpoint, expected.spec)
    except CheckpointError as error:
        return [str(error)]
    assert weights is not None, "detect names a format"
    problems += _scales(checkpoint, weights.reader, expected)
    problems += _shapes(weights, expected)
    problems += _groups(checkpoint, weights.reader, expected)
    problems += _global_scales(checkpoint, expected)
    problems += _config(weights, expected)
    problems += validate_outliers.problems(weights, expected.schemes, expected.source)
    return problems or list(_samples(weights, expected))  # the codec names one thing only


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


def _scales(checkpoint: Checkpoint, reader: Reader, expected: Expected) -> Iterator[str]:
    main = reader.scales[0]
    found = {
        f"{module_of(x)}.{part}": scheme if part == main else None
        for x, scheme in expected.schemes.items()
        for part in reader.scales
    }
    found |= {name: None for name, _, _ in expected.cache()}
    for name, scheme in found.items():
        if name in checkpoint.tensors:
            bad, how = damage(checkpoint.read(name), scheme)
            if bad:
                yield f"tensor {name} has scales that are {how}"


def _shapes(weights: CodedWeights, expected: Expected) -> Iterator[str]:
    """What a reader takes for the shapes of the original."""
    try:
        shapes = weights.shapes
    except CheckpointError as error:
        yield str(error)
        return
    for name, shape in shapes.items():
        meant = expected.source[name].shape
        if shape != meant:
            yield f"tensor {name} reads back as {list(shape)}, not {list(meant)}"


def _groups(checkpoint: Checkpoint, reader: Reader, expected: Expected) -> Iterator[str]:
    linears = {linear.tensor: linear for linear in expected.spec.all_linears()}
    for tensor in expected.with_g_idx:
        name = f"{module_of(tensor)}.{reader.g_idx}"
        g_idx = checkpoint.read(name)
        groups = expected.schemes[tensor].groups(linears[tensor].shape[1])
        if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
            yield f"tensor {name} names a group that has no scale"


def _global_scales(checkpoint: Checkpoint, expected: Expected) -> Iterator[str]:
    """Runtimes keep one global scale for the matrix that they fuse linears into."""
    fused: dict[tuple[int, str, int | None], float] = {}
    for block in expected.spec.blocks:
        for linear in block.linears:
            names = (f"{linear.name}.{part}" for part in GLOBAL_SCALES)
            name = next((x for x in names if x in checkpoint.tensors), None)
            if linear.fused is None or name is None:
                continue
            scale = float(checkpoint.read(name))
            if fused.setdefault((block.index, linear.fused, linear.expert), scale) != scale:
                yield f"tensor {name} is not that of the linears which runtimes fuse it with"


def _config(weights: CodedWeights, expected: Expected) -> Iterator[str]:
    """What config.json says of every linear, and of a head that has no tensor."""
    fused: dict[tuple[int, str], QuantScheme | None] = {}
    for block in expected.spec.blocks:
        for linear in block.linears:
            want = expected.schemes.get(linear.tensor)
            yield from _said(weights, linear, want)
            if linear.fused is None:
                continue
            other = fused.setdefault((block.index, linear.fused), want)
            if other != want:
                yield (
                    f"{linear.name} is {_say(want)} while another part of the matrix that runtimes"
                    f" fuse it into is {_say(other)}; vLLM refuses that"
                )
    head = expected.spec.head_linear()
    if head is not None:
        yield from _said(weights, head, expected.schemes.get(head.tensor))
    elif weights.reader.lists_modules and weights.schemes.scheme("lm_head") is not None:
        yield "lm_head: quantization_config does not ignore it, but it is tied to the embedding"
    if weights.kv_cache != expected.kv_cache:
        yield "quantization_config.kv_cache_scheme is not that of the scales which are stored"


def _said(weights: CodedWeights, linear: LinearSpec, want: QuantScheme | None) -> Iterator[str]:
    if want is not None:
        want, got = weights.reader.as_read(want), weights.scheme(linear.name)
    else:
        listed = weights.reader.lists_modules
        got = weights.schemes.scheme(linear.name) if listed else None
    if got != want:
        yield f"{linear.name}: quantization_config says {_say(got)}, stored is {_say(want)}"


def _samples(weights: CodedWeights, expected: Expected) -> Iterator[str]:
    """One weight of every scheme and shape, read back: its shape, and codes within their range."""
    linears = {linear.tensor: linear for linear in expected.spec.all_linears()}
    seen: set[tuple[QuantScheme, tuple[int, int], bool]] = set()
    for name, scheme in expected.schemes.items():
        kind = scheme, linears[name].shape, name in expected.with_g_idx
        if kind in seen:
            continue
        seen.add(kind)
        try:
            found = weights.quantized(name)
        except CheckpointError as error:
            yield str(error)
            continue
        assert found is not None, f"{name} has scales"
        if found.shape != kind[1]:
            yield f"{name}: reads back as {list(found.shape)}, not {list(kind[1])}"
        if (found.zero is None) != weights.reader.as_read(scheme).symmetric:
            zeros = "with" if found.zero is not None else "without"
            yield f"{name}: {scheme.describe()} reads back {zeros} zero points"


def _say(scheme: QuantScheme | None) -> str:
    return "not quantized" if scheme is None else scheme.describe()
