"""From a graph to files: model.onnx, and beside it one file of all weights that are written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.external_data import convert_tensors_to_external

from compress.checkpoint import disk
from compress.errors import CompressError
from compress.version import VERSION
from compress_exporters.decoded import decoded
from compress_exporters.exporter import AGAIN, Progress
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.graph import INLINE
from compress_exporters.onnx.graph.linked import pointed, read_by
from compress_exporters.onnx.names import DATA, MODEL, SECOND

__all__ = ["DATA", "MODEL", "save", "size"]


def save(build: Build, folder: Path, progress: Progress) -> tuple[str, ...]:
    """Writes weight after weight, none but one of them in memory; the names of the files."""
    data = _data_name(build)
    with disk.refusing(f"write {folder / MODEL}", AGAIN), _unwrapped():
        stay = _looked_through(build, progress)
        with _placed(build, folder / data, stay, progress):
            ir.save(build.graph.model(build.spec.model_type, VERSION), folder / MODEL)
    build.forget()
    return tuple(name for name in (MODEL, data) if (folder / name).is_file())


def _data_name(build: Build) -> str:
    """DATA, unless the graph that is there reads a file of this name."""
    there = build.weights.checkpoint.path / MODEL
    if not build.options.in_place or not there.exists():
        return DATA
    return SECOND if DATA in (read_by(there) or ()) else DATA


def _looked_through(build: Build, progress: Progress) -> int:
    """How many weights stay where they are; CheckpointError for NaN and infinity in them."""
    names = [str(tensor.name) for tensor in pointed(build)]
    total = len(names) + len(_large(build))
    for number, name in enumerate(names, 1):
        decoded(build.weights, name)
        progress(name, number, total)
    return len(names)


@contextmanager
def _placed(build: Build, path: Path, before: int, progress: Progress) -> Iterator[None]:
    """Writes every large weight that is in no file yet; meanwhile the graph has their places."""

    def tell(tensor: Any, info: Any) -> None:
        progress(str(tensor.name), before + info.index + 1, before + info.total)

    values = _large(build)
    tensors = [value.const_value for value in values if value.const_value is not None]
    placed = []
    if tensors:
        placed = convert_tensors_to_external(tensors, path.parent, path.name, callback=tell)
    try:
        for value, place in zip(values, placed, strict=True):
            value.const_value = place
        yield
    finally:
        for value, tensor in zip(values, tensors, strict=True):
            value.const_value = tensor


def _large(build: Build) -> list[ir.Value]:
    """Initializers that are written, and not into the graph."""
    return [
        value
        for value in build.graph.initializers.values()
        if (tensor := value.const_value) is not None
        and not isinstance(tensor, ir.ExternalTensor)
        and tensor.nbytes > INLINE
    ]


@contextmanager
def _unwrapped() -> Iterator[None]:
    """onnx_ir reads small weights inside of its own functions and wraps what they raise."""
    try:
        yield
    except ir.serde.SerdeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, CompressError):
            cause = cause.__cause__
        raise error if cause is None else cause from None


def size(build: Build) -> int:
    """Bytes of all weights that are written."""
    tensors = (value.const_value for value in build.graph.initializers.values())
    return sum(x.nbytes for x in tensors if x is not None and not isinstance(x, ir.ExternalTensor))
