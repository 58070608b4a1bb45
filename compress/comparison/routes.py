"""Who a result is for: a runtime that loads checkpoints, or one that loads a file made of them."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from compress.errors import RequestError

if TYPE_CHECKING:  # a shell asks for the names while a line is typed
    from compress.plan.plan import Plan
    from compress.quant.scheme import QuantScheme

_BLOCK = 32  # of llama.cpp's types that hold our codes as they are


@dataclass(frozen=True, slots=True)
class Route:
    """name: as users say it. verdicts: names of the plan's runtimes, of which one must take the
    result. export: the target of `export` whose file the runtime loads; None where it loads the
    checkpoint. format: of results that are that file already. starts: what lines begin with that
    start it; empty for all lines."""

    name: str
    verdicts: tuple[str, ...] = ()
    export: str | None = None
    format: str | None = None
    starts: str = ""


_ROUTES: tuple[Route, ...] = (
    Route("vllm", ("vLLM on GPU", "vLLM on CPU"), starts="vllm "),
    Route("vllm-gpu", ("vLLM on GPU",), starts="vllm "),
    Route("vllm-cpu", ("vLLM on CPU",), starts="vllm "),
    Route("transformers", ("transformers",)),
    Route("llama.cpp", ("llama.cpp",), "gguf", "gguf", "llama-"),
    Route("onnxruntime", (), "onnx"),
    Route("onnxruntime-genai", (), "onnx-genai"),
    Route("openvino", (), "onnx"),
    Route("tensorrt", (), "tensorrt"),
)
ROUTES: Mapping[str, Route] = MappingProxyType({route.name: route for route in _ROUTES})


def route_of(name: str) -> Route:
    """RequestError, with the nearest, for a runtime that nobody knows."""
    plain = name.strip().lower().replace("_", "-")
    plain = {"llamacpp": "llama.cpp", "llama-cpp": "llama.cpp"}.get(plain, plain)
    if plain not in ROUTES:
        close = difflib.get_close_matches(plain, ROUTES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RequestError(f"--for is {name!r}; it is one of {', '.join(ROUTES)}{hint}")
    return ROUTES[plain]


def why_not_for(route: Route, plan: "Plan") -> str | None:
    """What stands between a planned result and the runtime; None where it loads."""
    if route.format is not None and plan.format == route.format:
        return _refused(route, plan)
    if route.export is None:
        return _refused(route, plan)
    return next(_lossy(plan), None) if route.export == "gguf" else None


def _refused(route: Route, plan: "Plan") -> str | None:
    """By the plan's verdicts: the first reason where all refuse, or where nobody was asked."""
    found = [x for x in plan.runtimes if x.runtime in route.verdicts]
    if any(x.verdict in ("yes", "expected") for x in found):
        return None
    if found:
        return f"{found[0].runtime}: {found[0].reason}"
    return None if route.format == plan.format else f"the plan says nothing of {route.name}"


def _lossy(plan: "Plan") -> Iterator[str]:
    """Why llama.cpp's file would not mean the numbers that were measured."""
    if plan.kv_cache is not None:
        yield "its scales for the key/value cache have no place in the file"
    for module in plan.modules:
        if module.linear.shape[1] % _BLOCK:
            rows = f"rows of {module.linear.shape[1]} numbers"
            yield f"{module.linear.name}: {rows} are no whole blocks of {_BLOCK}"
        why = _no_block(module.scheme)
        if why is not None:
            yield why


def _no_block(scheme: "QuantScheme") -> str | None:
    if scheme.type == "float":
        return f"{scheme.describe()}: no type of GGUF holds codes that are floats"
    if scheme.activation is not None:
        return f"{scheme.describe()}: llama.cpp rounds inputs its own way"
    if scheme.granularity in ("group", "block") and scheme.group_size % _BLOCK:
        return f"groups of {scheme.group_size} are no whole blocks of {_BLOCK}"
    return None
