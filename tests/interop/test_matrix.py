"""Every kind of result in every format, exported from one calibrated result: transformers' part.

A row is one test, which records its cells for `python -m benchmarks.matrix.run`. Behind its first
forward the loader's model computes in fp32, so that what differs is the loader's doing.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.matrix.rows import LOADERS, ROWS, TRANSFORMERS, Row
from benchmarks.matrix.table import short, stored_cells
from compress.formats import CODECS, Verdict
from helpers.in_transformers import cache_is_left_alone
from helpers.matrix_cells import (
    PROMPTS,
    Made,
    MakeRow,
    Outputs,
    difference,
    facts,
    failure,
    opened,
    outputs,
    reference,
)

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("compressed_tensors", "bitsandbytes")]

# All but LLM.int8() is ours to the bit here. bitsandbytes divides in another way, so that an input
# between two codes falls to either side, which moves logits by up to 0.1.
BOUND, INT8_BOUND = 1e-4, 0.15
DEQUANTIZE = (
    "loads with CompressedTensorsConfig(dequantize=True), which rounds weights once, to bf16"
)
BFLOAT16 = "loads in bfloat16, to which weights are rounded once"
DEQUANTIZED = "dequantized: weights are rounded once, to bf16, and inputs not quantized"
DYNAMIC = "the dynamic form: bitsandbytes does not know our file of calibrated columns"


@dataclass(frozen=True, slots=True)
class How:
    """options: of from_pretrained. ours: of our reference. notes: what to know of a "yes"."""

    options: Mapping[str, Any]
    ours: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    bound: float = BOUND


def _how(fmt: str, verdict: Verdict, made: Made) -> How:
    from transformers import CompressedTensorsConfig

    single, half = {"dtype": torch.float32}, {"dtype": torch.bfloat16}
    as_weights: dict[str, Any] = {"rounded": True, "inputs": None, "cache": None}
    if fmt == "compressed-tensors":
        config = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
        return {
            "": How(single),
            "dequantize": How(single | config, as_weights, (DEQUANTIZE,)),
            "bfloat16": How(half, {"rounded": True}, (BFLOAT16,)),
        }[verdict.load]
    side = (DYNAMIC,) if opened(made.origin).side is not None else ()
    return {
        "fp8": How(half, as_weights, (DEQUANTIZED,)),
        "bitsandbytes": How(half, {"side": False}, side, INT8_BOUND),
        "dense": How(single, as_weights),
    }[fmt]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(row: Row, matrix_row: MakeRow, record_property: Any) -> None:
    made = matrix_row(row)
    cells = {fmt: {"method": row.name, "format": fmt, **_cell(made, fmt)} for fmt in CODECS}
    for cell in cells.values():
        record_property("cell", json.dumps(cell))
    packages = ("transformers", "torch", "compressed-tensors", "bitsandbytes", "accelerate")
    record_property("versions", json.dumps({TRANSFORMERS: {p: version(p) for p in packages}}))
    for fmt, cell in cells.items():
        if cell.get("loader") == TRANSFORMERS:
            taken = made.formats[fmt].of(TRANSFORMERS).verdict != "no"
            if fmt == "compressed-tensors" and "cache" in row.name and cache_is_left_alone():
                taken = False  # its scales have no place in the model
            assert (cell["outcome"] == "yes") == taken, cell
    if "MATRIX_REMAKE" not in os.environ:
        stored = {c["format"]: c for c in stored_cells() if c["method"] == row.name}
        assert refusals(cells) == refusals(stored), "make formats-matrix writes the table anew"


def refusals(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {fmt: short(c["reason"], fmt) for fmt, c in cells.items() if c["outcome"] == "refused"}


def _cell(made: Made, fmt: str) -> dict[str, Any]:
    """A refusal; or what transformers made of it; or that it was written, for other loaders."""
    exported = made.formats[fmt]
    if exported.folder is None:
        return {"outcome": "refused", "reason": exported.reason}
    if TRANSFORMERS not in LOADERS[fmt]:
        return {"outcome": "written"}
    how = _how(fmt, exported.of(TRANSFORMERS), made)
    try:
        found = _load(str(exported.folder), how)
    except (RuntimeError, ValueError) as problem:
        return {"loader": TRANSFORMERS, "outcome": "not loaded", "reason": failure(problem)}
    expected = reference(made, **how.ours)
    judged = facts(expected, difference(expected, found), found.tokens, how.bound)
    return {"loader": TRANSFORMERS, **judged, "notes": how.notes}


def _load(folder: str, how: How) -> Outputs:
    """Outputs of the loader's model; RuntimeError also where it has no place for a tensor, or
    misses one."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **how.options
    )
    with torch.no_grad():
        model.eval()(PROMPTS)
    for what, names in info.items():
        if names:
            raise RuntimeError(f"{len(names)} {what}, as {sorted(map(str, names))[0]}")
    torch.nn.Module.float(model)  # transformers' own refuses quantized models
    return outputs(model)[0]


def test_one_wrong_scale_is_seen(matrix_row: MakeRow, tmp_path: Path) -> None:
    """A cell is no "yes" when one group of one layer is 10 % larger than what was calibrated."""
    made = matrix_row(ROWS[0])
    folder = made.formats["compressed-tensors"].folder
    assert folder is not None
    shutil.copytree(folder, tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight_scale"][5, 1] *= 1.1
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    found = _load(str(tmp_path / "out"), How({"dtype": torch.float32}))
    expected = reference(made)
    judged = facts(expected, difference(expected, found), found.tokens, BOUND)
    assert judged["outcome"] == "wrong"
