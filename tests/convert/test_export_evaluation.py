"""An export measures exactly as its source does: equal codes and scales are equal weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.formats import FP8_CACHE, open_weights
from compress.quant.scheme import PRESETS, QuantScheme
from compress.verbs import EvaluationOptions, evaluate_checkpoint, export
from helpers.exporters.exports import ASYM, SYM, opened
from helpers.short_runs import WORDS

_BLOCK = PRESETS["FP8_BLOCK"]
assert _BLOCK.activation is not None
BLOCK = replace(_BLOCK, group_size=32, activation=replace(_BLOCK.activation, group_size=32))
# Every format with scales of another dtype than bf16, and dense weights.
WAYS = [
    (SYM, "gptq"),
    (SYM, "modelopt"),
    (ASYM, "awq"),
    (ASYM, "dense"),
    (PRESETS["W8A16"], "gptq_v2"),
    (BLOCK, "fp8"),
    (PRESETS["FP8"], "fp8"),
    (PRESETS["FP8"], "modelopt"),
    (PRESETS["W8A8_STATIC"], "modelopt"),
]


@pytest.mark.parametrize(("scheme", "to"), WAYS, ids=[f"{s.describe()} to {to}" for s, to in WAYS])
def test_weights_are_read_as_they_were(
    compressed: Callable[..., Path], tmp_path: Path, scheme: QuantScheme, to: str
) -> None:
    source = compressed(scheme=scheme)
    export(source, to, tmp_path / "to")
    before, after = opened(source), open_weights(Checkpoint.open(tmp_path / "to"))
    for linear in before.spec.all_linears():
        x, y = before.read(linear.tensor), after.read(linear.tensor)
        assert x.dtype == y.dtype == torch.bfloat16
        assert torch.equal(x, y), linear.name


@pytest.mark.parametrize(
    ("scheme", "to", "given"),
    [(SYM, "gptq", {}), (BLOCK, "fp8", {}), (PRESETS["FP8"], "modelopt", {"kv_cache": FP8_CACHE})],
    ids=["gptq", "fp8", "modelopt with a cache"],
)
def test_an_evaluation_finds_no_difference(
    compressed: Callable[..., Path],
    tmp_path: Path,
    scheme: QuantScheme,
    to: str,
    given: dict[str, Any],
) -> None:
    """8-bit inputs and caches show the least change of a weight: it moves them to other codes."""
    source = compressed(scheme=scheme, **given)
    export(source, to, tmp_path / "to")
    (tmp_path / "words.txt").write_text(WORDS * 4)
    report = evaluate_checkpoint(
        tmp_path / "to",
        EvaluationOptions(texts=[str(tmp_path / "words.txt")], max_tokens=64),
        against=source,
    )
    (found,) = report.quality.texts
    assert (found.kl, found.top1_agreement) == (0.0, 1.0)
    assert found.ppl_source == found.ppl_result
