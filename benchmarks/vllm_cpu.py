"""Agreement of real vLLM on CPU with our reading of the same codes, in all that it takes there.

    python -m benchmarks.vllm_cpu

runs tests/peers/test_vllm_agreement.py on the demo model, stores what it recorded as
benchmarks/results/vllm_cpu.json and writes the table of docs/formats.md. Needs vLLM's environment
(benchmarks/peers/README.md) and the texts beside the clone; 10 minutes on 2 cores. Nothing is
stored when a test fails.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import recorded
from benchmarks.matrix import table
from benchmarks.matrix.rows import Row
from benchmarks.processes import RESULTS, setting

RESULT = RESULTS / "vllm_cpu.json"
TEST = "tests/peers/test_vllm_agreement.py"
SHORT = {"half": "fp16", "float32": "fp32"}
MARKS = "<!-- vLLM: python -m benchmarks.vllm_cpu -->", "<!-- end of vLLM -->"


@dataclass(frozen=True, slots=True)
class Case:
    """row: what is made. formats: those in which vLLM opens it here. blocks: so many of the
    model's first ones; None is all."""

    row: Row
    formats: tuple[str, ...] = ("compressed-tensors",)
    blocks: int | None = None

    @property
    def name(self) -> str:
        return self.row.name if self.blocks is None else f"{self.row.name}, the first block alone"


def _gptq(scheme: Any) -> Mapping[str, Any]:
    return {"method": "gptq", "scheme": scheme}


_GROUP = {"bits": 4, "granularity": "group", "group_size": 64}
_GPTQ = _gptq(_GROUP)
_AWQ = {"method": "awq", "scheme": {**_GROUP, "symmetric": False}}
_CHANNEL = _gptq({"bits": 4, "granularity": "channel"})
_OTHERS = [{"targets": ["down_proj"], "group_size": 128}, {"targets": ["o_proj"], "skip": True}]
_SMOOTHED = {"method": "smoothquant"}
_DYNAMIC = {"method": "fp8", "scheme": "FP8_DYNAMIC"}
_ONE = {**_DYNAMIC, "targets": ["*.5.mlp.down_proj"]}
_CACHE = {"kv_cache": "fp8"}
_FP8 = Row("fp8, FP8_DYNAMIC", (_DYNAMIC,))
_FP8_AND_CACHE = Row("fp8, FP8_DYNAMIC, FP8 cache", (_DYNAMIC,), True, _CACHE)
_CT = "compressed-tensors"

CASES = (
    Case(Row("gptq, 4 bits", (_GPTQ,), True), (_CT, "gptq", "gptq_v2", "awq")),
    Case(Row("awq, 4 bits, zero points", (_AWQ,), True), (_CT, "awq")),
    Case(Row("gptq, 4 bits, a scale a row", (_CHANNEL,), True), (_CT, "gptq")),
    Case(
        Row("gptq, 4 bits, two groups, o unquantized", ({**_GPTQ, "overrides": _OTHERS},), True),
        (_CT, "gptq"),
    ),
    Case(
        Row("gptq, 4 bits, the head too", (_GPTQ, {**_GPTQ, "targets": ["lm_head"]}), True),
        (_CT, "gptq"),
    ),
    Case(Row("smoothquant + gptq, W8A8", (_SMOOTHED, _gptq("W8A8")), True)),
    Case(Row("smoothquant + gptq, W8A8 static", (_SMOOTHED, _gptq("W8A8_STATIC")), True)),
    Case(Row("FP8 cache, one layer in FP8_DYNAMIC", (_ONE,), True, _CACHE)),
    Case(_FP8, blocks=1),
    Case(_FP8, (_CT, "modelopt")),
    Case(_FP8_AND_CACHE, blocks=1),
    Case(_FP8_AND_CACHE, (_CT, "modelopt")),
)


def section(result: Mapping[str, Any]) -> str:
    """The cells as a table in markdown."""
    return "\n".join(_lines(result["cells"])) + "\n\n" + _made(result["made"])


def _lines(cells: list[Mapping[str, Any]]) -> Iterator[str]:
    yield "| result | format | vLLM in | same first choice | ours in fp64 | gap | bound |"
    yield "|---|---|---|---|---|---|---|"
    for cell in cells:
        place = f"| {cell['method']} | `{cell['format']}` | {SHORT[cell['dtype']]} |"
        if "same_as" in cell:
            yield f"{place} scores of `{cell['same_as']}` in fp16, to the bit | | | |"
            continue
        own = "" if cell["own"] is None else _share(cell["own"], cell["positions"])
        gap = "–" if cell["gap"] is None else table.number(cell["gap"])
        same = _share(cell["different"], cell["positions"])
        yield f"{place} {same} | {own} | {gap} | {table.number(cell['bound'])} |"


def _share(different: int, positions: int) -> str:
    return f"{100 - 100 * different / positions:.2f} % ({different} not)"


def _made(made: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return f"Made by `{made['command']}` on {made['date'].split()[0]} ({versions})."


def stored() -> dict[str, Any]:
    return dict(json.loads(RESULT.read_text()))


def document(text: str) -> str:
    """docs/formats.md with the stored table between its markers."""
    return table.written(text, section(stored()), MARKS)


def main() -> None:
    found = recorded.measure([TEST], ("agreement", "versions"))
    if not found["versions"]:
        sys.exit("the tests were skipped, so nothing is stored")
    made = {**setting("benchmarks.vllm_cpu"), "versions": found["versions"][0]}
    RESULT.write_text(json.dumps({"made": made, "cells": found["agreement"]}, indent=1) + "\n")
    table.DOCUMENT.write_text(document(table.DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
