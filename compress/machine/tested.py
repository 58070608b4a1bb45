"""Which releases of other packages this version was tested with."""

import re
from collections.abc import Mapping
from types import MappingProxyType

Release = tuple[int, ...]

# The first and the last release that the test suite, or `make test-interop`, ran with; "2.13" is
# all of 2.13.x. Widened when the suite has passed with another one.
TESTED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "torch": ("2.13", "2.13"),
        "transformers": ("5.23", "5.24"),
        "tokenizers": ("0.23", "0.23"),
        "safetensors": ("0.8", "0.8"),
        "numpy": ("2.4", "2.4"),
        "xxhash": ("4.1", "4.1"),
        "triton": ("3.9", "3.9"),
        "datasets": ("5.2", "5.2"),
        "accelerate": ("1.15", "1.15"),
        "compressed-tensors": ("0.20", "0.20"),
        "gguf": ("0.19", "0.19"),
        "onnx": ("1.23", "1.23"),
        "onnxruntime": ("1.32", "1.32"),
        "onnxruntime-genai": ("0.18", "0.18"),
        "openvino": ("2026.4", "2026.4"),
    }
)


def untested(package: str, version: str) -> str | None:
    """Which releases were tested, where this one was not; None where it was, or where no release
    of the package is known."""
    if package not in TESTED:
        return None
    first, last = TESTED[package]
    low, high = _release(first), _release(last)
    if low <= _release(version)[: len(low)] and _release(version)[: len(high)] <= high:
        return None
    return first if first == last else f"{first} to {last}"


def _release(version: str) -> Release:
    """The numbers at the beginning: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
