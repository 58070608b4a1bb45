"""From a graph to files: model.onnx, and all weights in one file beside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir

from compress.checkpoint import disk
from compress.errors import CompressError
from compress.version import VERSION
from compress_exporters.exporter import AGAIN, Progress
from compress_exporters.onnx.build import Build

MODEL, DATA = "model.onnx", "model.onnx.data"
# Smaller initializers stay in the graph, where shape inference sees them.
INLINE = 1024


def save(build: Build, folder: Path, progress: Progress) -> tuple[str, ...]:
    """Writes weight after weight, none but one of them in memory; the names of the files."""

    def tell(tensor: Any, info: Any) -> None:
        progress(str(tensor.name), info.index + 1, info.total)

    model = build.graph.model(build.spec.model_type, VERSION)
    with disk.refusing(f"write {folder / MODEL}", AGAIN), _unwrapped():
        ir.save(
            model, folder / MODEL, external_data=DATA, size_threshold_bytes=INLINE, callback=tell
        )
    return tuple(name for name in (MODEL, DATA) if (folder / name).is_file())


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
    """Bytes of all weights."""
    values = (value.const_value for value in build.graph.initializers.values())
    return sum(value.nbytes for value in values if value is not None)
