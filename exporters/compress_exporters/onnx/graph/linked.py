"""Weights that stay in the checkpoint's own files, to which a graph beside them points."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from compress.errors import CheckpointError
from compress.report import units
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.graph import INLINE, PRODUCER

CODES: Mapping[str, ir.DataType] = MappingProxyType(
    {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}
)


def linked(build: Build, tensor: str) -> ir.Value | None:
    """A weight where it lies, in its own type; None for one that has to be written, and where
    nobody asked."""
    info = build.weights.checkpoint.tensors.get(tensor)
    coded = build.weights.is_quantized(tensor.removesuffix(".weight"))
    if not build.options.in_place or info is None or coded:
        return None
    dtype, graph = CODES.get(info.dtype), build.graph
    if info.nbytes <= INLINE:
        return None
    if dtype is None or graph.dtype not in (dtype, ir.DataType.FLOAT):
        why = f"the checkpoint has them in {info.dtype}, the graph in {build.options.computed}"
        copied(build, tensor, why)
        return None
    if info.start % dtype.itemsize:
        copied(build, tensor, "they begin at no multiple of a number's size")
        return None
    return graph.linked(
        ir.ExternalTensor(
            info.file,
            info.start,
            info.nbytes,
            dtype,
            shape=ir.Shape(info.shape),
            name=tensor,
            base_dir=build.weights.checkpoint.path,
        )
    )


def wide(build: Build, at: str, value: ir.Value, tensor: str) -> ir.Value:
    """What was made of a weight in its own type, in the graph's. at: as for Graph.op."""
    info, graph = build.weights.checkpoint.tensors[tensor], build.graph
    if CODES[info.dtype] == graph.dtype:
        return value
    return build.once(
        f"wide {value.name}", lambda: graph.op(at, "Cast", value, to=int(graph.dtype))
    )


def copied(build: Build, tensor: str, why: str) -> None:
    """Remembers a weight that is written although the graph lies beside it."""
    info = build.weights.checkpoint.tensors[tensor]
    if build.options.in_place and info.nbytes > INLINE:
        build.copied.setdefault(why, set()).add(tensor)


def pointed(build: Build) -> Iterator[ir.ExternalTensor]:
    """Every weight that stays where it is."""
    for value in build.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            yield value.const_value


def size(build: Build) -> int:
    """Bytes that the graph points to."""
    return sum(tensor.nbytes for tensor in pointed(build))


def notes(build: Build) -> Iterator[str]:
    """How many weights stay, and how many do not, why."""
    files = dict.fromkeys(str(tensor.location) for tensor in pointed(build))
    if files:
        count = units.counted(sum(1 for _ in pointed(build)), "weight")
        yield f"the graph points to {count} ({units.size(size(build))}) in {', '.join(files)}"
    for why, which in build.copied.items():
        yield f"{units.counted(len(which), 'dense weight')} written anew: {why}"


def read_by(model: Path) -> frozenset[str] | None:
    """Names of the files that a graph of ours reads; None for what is no graph of ours.
    CheckpointError for a file that cannot be read."""
    try:
        found = onnx.load(model, load_external_data=False)
    except DecodeError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {model}: {error.strerror or error}") from error
    if found.producer_name != PRODUCER:
        return None
    entries = (entry for tensor in found.graph.initializer for entry in tensor.external_data)
    return frozenset(entry.value for entry in entries if entry.key == "location")
