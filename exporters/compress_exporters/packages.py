"""Which packages that targets use are there, and how old they may be. pip sees to it only where it
installs the extra."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Package:
    """distributions: that bring the module. least: the oldest version. knows: what older ones do
    not know."""

    distributions: tuple[str, ...]
    least: str
    knows: str


# By module; versions are those of the extras in pyproject.toml.
PACKAGES: Mapping[str, Package] = MappingProxyType(
    {
        "onnx": Package(("onnx",), "1.18", "opset 23"),
        "onnx_ir": Package(("onnx-ir",), "1.1", "opset 23"),
        "onnxruntime": Package(("onnxruntime", "onnxruntime-gpu"), "1.23", "opset 23"),
        "gguf": Package(("gguf",), "0.17", "all types of blocks"),
    }
)


def installed(module: str) -> bool:
    """Whether it can be imported. A folder of that name where Python looks, as of an export to
    `tensorrt` or `gguf`, is found as well, and is no module."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def too_old(module: str) -> str | None:
    """What is wanted and what is there, None where that is new enough or nobody knows."""
    package = PACKAGES.get(module)
    if package is None:
        return None
    found = [x for name in package.distributions if (x := _version(name)) is not None]
    if not found or any(_parts(x) >= _parts(package.least) for x in found):
        return None
    return (
        f"{package.distributions[0]} {package.least} or newer, which knows {package.knows}, and"
        f" {found[0]} is installed"
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _parts(text: str) -> tuple[int, ...]:
    """The first two numbers: what comes behind them makes no version too old."""
    return tuple(int(x) for x in re.findall(r"\d+", text)[:2])
