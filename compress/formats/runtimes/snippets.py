"""How a result is opened: lines to copy, for the runtimes that were found to take it."""

import json
import shlex
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from compress.formats import dense
from compress.formats.runtimes.verdicts import LoadOption, Verdict
from compress.report.terminal.copied import as_lines

# What transformers needs beside itself, by format.
PACKAGES = {
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes accelerate",
    "gptq": "gptqmodel optimum",
    "gptq_v2": "gptqmodel optimum",
    "awq": "gptqmodel optimum",
    "fp8": "accelerate",
    "gguf": "gguf accelerate",
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
        "gguf": ("AutoModelForCausalLM", ', gguf_file="model.gguf"'),
    }
)
VLLM = ("vLLM on CPU", "vLLM on GPU")
# What vLLM needs to be told, by format: the dtype of the scales.
_SERVING = dict.fromkeys(("gptq", "gptq_v2", "awq"), " --dtype half")


def needs(fmt: str) -> str | None:
    """The command that installs what transformers needs beside itself. fmt: a key of FORMATS."""
    package = PACKAGES.get(fmt)
    return None if package is None else f"pip install {package}"


def in_python(runtimes: Iterable[Verdict], folder: str) -> tuple[str, ...]:
    """Lines for transformers, with the option it needs; none where it is not said to take the
    result."""
    found = [v for v in runtimes if v.runtime == "transformers"]
    if any(v.verdict in ("no", "unknown") for v in found):
        return ()
    names, option = _OPTIONS[found[0].load if found else ""]
    return (
        f"from transformers import {names}",
        f"model = AutoModelForCausalLM.from_pretrained({json.dumps(folder)}{option})",
    )


def as_server(fmt: str, runtimes: Iterable[Verdict], folder: str) -> tuple[str, ...]:
    """The line for vLLM, where it is known to take the result."""
    known = any(v.runtime in VLLM and v.verdict == "yes" for v in runtimes)
    return (f"vllm serve {shlex.quote(folder)}{_SERVING.get(fmt, '')}",) if known else ()


def in_llamacpp(runtimes: Iterable[Verdict], folder: str) -> tuple[str, ...]:
    """Lines for llama.cpp's programs, where it is known to take the result."""
    if not any(v.runtime == "llama.cpp" and v.verdict == "yes" for v in runtimes):
        return ()
    model = shlex.quote(f"{folder}/model.gguf")
    text = f"llama-completion -m {model} -p 'Once upon a time' -n 100 -no-cnv"
    return (text, f"llama-cli -m {model}", f"llama-server -m {model}")


def all_lines(fmt: str, runtimes: Iterable[Verdict], folder: str) -> tuple[str, ...]:
    """Everything, for the end of a command: what is installed, what is run in Python, what in a
    shell, with an empty line between two."""
    runtimes = tuple(runtimes)
    python, server = in_python(runtimes, folder), as_server(fmt, runtimes, folder)
    first, programs = needs(fmt), in_llamacpp(runtimes, folder)
    blocks = ((first,) if first and python else (), python, server, *((x,) for x in programs))
    return tuple(as_lines("\n".join(block) for block in blocks if block))


def why_not_opened(fmt: str, runtimes: Iterable[Verdict], dense_by: str) -> str | None:
    """Why `all_lines` has none, runtime by runtime; None where it has some.

    A runtime that is expected to take the result is none that refuses it: its line is left out as
    nobody tried it, and that is what is said. dense_by: the option that makes a dense result.
    """
    runtimes = tuple(runtimes)
    if all_lines(fmt, runtimes, ""):
        return None
    others = [v for v in runtimes if v.verdict in ("no", "unknown")]
    hoped = [v.runtime for v in runtimes if v not in others]
    refused = "; ".join(f"{v.runtime}: {v.reason}" for v in others)
    remedy = "" if fmt == dense.NAME else f"; {dense_by} loads anywhere"
    if not hoped:
        return f"no runtime is known to take it: {refused}{remedy}"
    verb = "is" if len(hoped) == 1 else "are"
    said = f"{' and '.join(hoped)} {verb} expected to take it, which was not tried"
    return f"{said}; others do not, {refused}{remedy}"


def for_card(fmt: str, runtimes: Iterable[Verdict]) -> str:
    """The part of a model card with lines to copy; FOLDER is where the result lies."""
    runtimes = tuple(runtimes)
    python = in_python(runtimes, "FOLDER")
    server = (*as_server(fmt, runtimes, "FOLDER"), *in_llamacpp(runtimes, "FOLDER"))
    first = needs(fmt)
    lines = ["## How to open it"] if python or server else []
    if python:
        lines += ["", *([f"With `{first}`:"] if first else []), "```python", *python, "```"]
    if server:
        lines += ["", "```sh", *server, "```"]
    return "\n".join([*lines, ""])
