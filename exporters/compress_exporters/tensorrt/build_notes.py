"""How an engine is built of a graph: build.json for programs, TENSORRT.md for people."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from compress.checkpoint import write_atomic
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.rotary import context
from compress_exporters.onnx.saving import DATA, MODEL
from compress_exporters.tensorrt.lint.operators import VERSION
from compress_exporters.tensorrt.profiles import Profile, Shapes, profiles

JSON, NOTES = "build.json", "TENSORRT.md"
# Compute capability from which a type is known; those below a builder refuses.
GPUS: Mapping[str, str] = {"INT4": "8.0", "FLOAT8E4M3FN": "8.9", "FLOAT4E2M1": "10.0"}


def write_notes(build: Build, folder: Path) -> tuple[str, ...]:
    """The names of both files."""
    facts = described(build)
    write_atomic(folder / JSON, (json.dumps(facts, indent=2) + "\n").encode())
    write_atomic(folder / NOTES, _text(facts).encode())
    return JSON, NOTES


def described(build: Build) -> dict[str, Any]:
    """Inputs, outputs, profiles and command lines."""
    graph, found = build.graph, profiles(context(build))
    return {
        "model": MODEL,
        "tensorrt": VERSION,
        "opset": graph.opsets[""],
        "strongly_typed": True,
        "compute_capability": _capability(build),
        "inputs": [_value(x) for x in graph.inputs],
        "outputs": [_value(x) for x in graph.outputs],
        "profiles": {name: _shapes(build, profile) for name, profile in found.items()},
        "trtexec": {name: _command(build, name, profile) for name, profile in found.items()},
    }


def _capability(build: Build) -> str | None:
    """The least that has all of the graph's types; None where any GPU of TensorRT's does."""
    known = (x.const_value for x in build.graph.initializers.values())
    dtypes = {x.dtype.name for x in known if x is not None}
    needed = [GPUS[name] for name in dtypes if name in GPUS]
    return max(needed, key=float, default=None)


def _value(value: ir.Value) -> dict[str, Any]:
    assert value.dtype is not None
    shape = [x if isinstance(x, int) else str(x.value) for x in value.shape or ()]
    return {"name": value.name, "dtype": value.dtype.name, "shape": shape}


def _shapes(build: Build, profile: Profile) -> dict[str, Shapes]:
    steps = {"min": profile.least, "opt": profile.usual, "max": profile.most}
    return {name: step.shapes(build.graph.inputs) for name, step in steps.items()}


def _command(build: Build, name: str, profile: Profile) -> list[str]:
    shapes = (
        f"--{at}Shapes=" + ",".join(f"{x}:{'x'.join(map(str, dims))}" for x, dims in found.items())
        for at, found in _shapes(build, profile).items()
    )
    engine = f"--saveEngine={name}.engine"
    return ["trtexec", f"--onnx={MODEL}", "--stronglyTyped", engine, *shapes]


USE = (
    "`total_sequence_length` is past and new tokens together. `attention_mask` is 1 where a token"
    " is real, and padding may be on either side. What comes out as `present.N` goes in as"
    " `past_key_values.N` with the next step; before the first one its length is 0. `position_ids`"
    " counts the real tokens of a text from 0."
)
TWO = (
    "One engine does for both kinds of steps; two are faster. `decode` takes one new token a text,"
    " `prefill` as many as its largest shape says: a longer prompt goes in chunks. Longer texts"
    " need an export with a larger `--max-context`. TensorRT 11 types strongly without"
    " `--stronglyTyped`."
)


def _text(facts: dict[str, Any]) -> str:
    capability = facts["compute_capability"]
    gpu = f" and a GPU of compute capability {capability} or more" if capability else ""
    first = (
        f"`{MODEL}` (weights in `{DATA}`, which stays beside it) is for TensorRT {VERSION} or"
        f" newer{gpu}. The lint of compress-model found nothing against the operators of that"
        " version. An engine is built on the machine that runs it; TensorRT for RTX 1.7 or newer"
        " builds its own anywhere."
    )
    lines = (f"## {name}\n\n```sh\n{_shell(x)}\n```" for name, x in facts["trtexec"].items())
    parts = ("# Building an engine", first, *lines, TWO, "## Inputs and outputs", _table(facts))
    return "\n\n".join((*parts, USE)) + "\n"


def _shell(command: list[str]) -> str:
    return " \\\n  ".join(command)


def _table(facts: dict[str, Any]) -> str:
    rows = ["| Name | Type | Shape |", "|---|---|---|"]
    for value in (*facts["inputs"], *facts["outputs"]):
        shape = ", ".join(map(str, value["shape"]))
        rows.append(f"| `{value['name']}` | {value['dtype']} | {shape} |")
    return "\n".join(rows)
