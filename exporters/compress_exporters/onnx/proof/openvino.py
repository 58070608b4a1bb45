"""A decoder's graph in OpenVINO, on the CPU, where the package is installed."""

import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import CheckpointError
from compress_exporters.onnx.proof.running import Array, Past, found, given
from compress_exporters.packages import installed

PACKAGE = "openvino"
TELEMETRY = "openvino_telemetry"
# No rounding but that of the graph: by itself OpenVINO rounds inputs, keys and values to 8 bits.
AS_IT_IS: Mapping[str, str] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "KV_CACHE_PRECISION": "f32",
}
MOST = 400  # characters of a reason, which may name every node
_PLACES = re.compile(r"(Exception from|Check '[^']*' failed at) \S+: ")


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A graph that OpenVINO has compiled. Names are those of decoder.py."""

    model: Any

    @classmethod
    def open(cls, path: Path) -> "Compiled":
        """CheckpointError where OpenVINO does not take the graph, or does not work."""
        try:
            with untold():
                import openvino
        except ImportError as error:
            raise CheckpointError(f"{name()} does not load: {_line(error)}") from error
        try:
            return cls(openvino.Core().compile_model(path, "CPU", dict(AS_IT_IS)))
        except RuntimeError as error:
            raise CheckpointError(f"{name()} does not open the graph: {_line(error)}") from error

    def step(self, ids: Array, mask: Array, past: Past | None = None) -> tuple[Array, Past]:
        """As Steps has it."""
        inputs = given(ids, mask) | dict(self.empty(len(ids)) if past is None else past)
        known = {_name(value) for value in self.model.inputs}
        try:
            outputs = self.model({k: v for k, v in inputs.items() if k in known})
        except RuntimeError as error:
            raise CheckpointError(f"{name()} does not run the graph: {_line(error)}") from error
        return found({_name(value): outputs[value] for value in self.model.outputs})

    def empty(self, texts: int) -> dict[str, Array]:
        """The past of nothing."""
        past = {_name(value): value for value in self.model.inputs}
        return {
            name: np.zeros((texts, *_heads(value)), value.get_element_type().to_dtype())
            for name, value in past.items()
            if name.startswith("past_key_values.")
        }


def _name(value: Any) -> str:
    """The graph's own; values that OpenVINO makes one have several."""
    return next(str(name) for name in value.get_names() if "/" not in name)


def _heads(value: Any) -> tuple[int, int, int]:
    """Heads, no positions, and the size of a head."""
    shape = value.get_partial_shape()
    return shape[1].get_length(), 0, shape[3].get_length()


def _line(error: Exception) -> str:
    """What it says, without places in OpenVINO's source."""
    return _PLACES.sub("", " ".join(str(error).split()))[:MOST]


@contextmanager
def untold() -> Iterator[None]:
    """Import OpenVINO without its package openvino_telemetry, which it does without as well.

    With it an import is told to Google Analytics, under an id that is made in the home folder,
    unless the user has declined.
    """
    asked = TELEMETRY not in sys.modules
    if asked:
        sys.modules[TELEMETRY] = None  # type: ignore[assignment]  # an import of it fails
    try:
        yield
    finally:
        if asked:
            del sys.modules[TELEMETRY]


def saturates() -> bool:
    """Whether its products of 8-bit integers end at 16 bits, as they do on x86 without VNNI: of two
    products added there the sum is cut at 32767. Codes of 7 bits stay below."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return platform.machine() == "x86_64" and "vnni" not in flags


def is_installed() -> bool:
    return installed(PACKAGE)


def name() -> str:
    """With its version, where it tells one."""
    try:
        return f"OpenVINO {version(PACKAGE).partition('-')[0]}"
    except PackageNotFoundError:
        return "OpenVINO"
