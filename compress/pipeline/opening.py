"""How a result is opened: lines to copy, for the runtimes that were found to take it."""

import json
import shlex

from compress.pipeline.plan import Plan

# What transformers needs beside itself, by format.
PACKAGES = {"compressed-tensors": "compressed-tensors", "bitsandbytes": "bitsandbytes accelerate"}
VLLM = ("vLLM on CPU", "vLLM on GPU")


def needs(plan: Plan) -> str | None:
    """The command that installs what transformers needs beside itself."""
    package = PACKAGES.get(plan.format)
    return None if package is None else f"pip install {package}"


def in_python(plan: Plan, folder: str) -> tuple[str, ...]:
    """Lines for transformers; none where it does not take the result."""
    if any(v.runtime == "transformers" and v.verdict == "no" for v in plan.runtimes):
        return ()
    return (
        "from transformers import AutoModelForCausalLM",
        f"model = AutoModelForCausalLM.from_pretrained({json.dumps(folder)})",
    )


def as_server(plan: Plan, folder: str) -> tuple[str, ...]:
    """The line for vLLM, where it is known to take the result."""
    known = any(v.runtime in VLLM and v.verdict == "yes" for v in plan.runtimes)
    return (f"vllm serve {shlex.quote(folder)}",) if known else ()


def all_lines(plan: Plan, folder: str) -> tuple[str, ...]:
    """Everything, for the end of a run."""
    python, server, first = in_python(plan, folder), as_server(plan, folder), needs(plan)
    return (*([first] if first and python else []), *python, *server)
