"""How a result is opened: lines to copy, for the runtimes that were found to take it."""

import json
import shlex
from collections.abc import Mapping
from types import MappingProxyType

from compress.formats import dense
from compress.formats.verdicts import LoadOption
from compress.pipeline.plan import Plan

# What transformers needs beside itself, by format.
PACKAGES = {
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes accelerate",
    "gptq": "gptqmodel optimum",
    "gptq_v2": "gptqmodel optimum",
    "awq": "gptqmodel optimum",
    "fp8": "accelerate",
}
# What is imported and what is passed on for an option that transformers needs.
_OPTIONS: Mapping[LoadOption, tuple[str, str]] = MappingProxyType(
    {
        "": ("AutoModelForCausalLM", ""),
        "dequantize": (
            "AutoModelForCausalLM, CompressedTensorsConfig",
            ", quantization_config=CompressedTensorsConfig(dequantize=True)",
        ),
        "bfloat16": ("AutoModelForCausalLM", ', dtype="bfloat16"'),
    }
)
VLLM = ("vLLM on CPU", "vLLM on GPU")


def needs(plan: Plan) -> str | None:
    """The command that installs what transformers needs beside itself."""
    package = PACKAGES.get(plan.format)
    return None if package is None else f"pip install {package}"


def in_python(plan: Plan, folder: str) -> tuple[str, ...]:
    """Lines for transformers, with the option it needs; none where it does not take the result."""
    found = [v for v in plan.runtimes if v.runtime == "transformers"]
    if any(v.verdict == "no" for v in found):
        return ()
    names, option = _OPTIONS[found[0].load if found else ""]
    return (
        f"from transformers import {names}",
        f"model = AutoModelForCausalLM.from_pretrained({json.dumps(folder)}{option})",
    )


def as_server(plan: Plan, folder: str) -> tuple[str, ...]:
    """The line for vLLM, where it is known to take the result."""
    known = any(v.runtime in VLLM and v.verdict == "yes" for v in plan.runtimes)
    return (f"vllm serve {shlex.quote(folder)}",) if known else ()


def all_lines(plan: Plan, folder: str) -> tuple[str, ...]:
    """Everything, for the end of a run."""
    python, server, first = in_python(plan, folder), as_server(plan, folder), needs(plan)
    return (*([first] if first and python else []), *python, *server)


def why_none(plan: Plan, folder: str) -> str | None:
    """Why `all_lines` has none, runtime by runtime."""
    if all_lines(plan, folder):
        return None
    reasons = [
        f"{v.runtime}: {v.reason}"
        if v.verdict == "no"
        else f"{v.runtime}: expected to take it, which was not tried"
        for v in plan.runtimes
    ]
    remedy = "" if plan.format == dense.NAME else "; --set output.format=dense loads anywhere"
    return f"no runtime is known to take it: {'; '.join(reasons)}{remedy}"
