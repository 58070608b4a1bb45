"""Block FP8 in transformers' own loader, which dequantizes it on a CPU while loading."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.arch.spec import LinearSpec
from compress.checkpoint import Checkpoint
from compress.formats import Verdict, open_weights
from compress.formats.runtimes.judge import runtimes
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from helpers import compressed_models
from helpers.compressed_models import Compressed
from helpers.in_transformers import load, logits, plain
from helpers.tiny_models import LINEAR, MIXTURES

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("accelerate")]

FP8 = PRESETS["FP8_BLOCK"]
BLOCK = replace(  # of 32, which divides what the tiny models have
    FP8,
    group_size=32,
    activation=ActivationScheme(type="float", granularity="group", group_size=32),
)


def verdict_of(written: Compressed) -> Verdict:
    schemes = {name: t.scheme for name, t in written.quantized.items()}
    found = runtimes("fp8", schemes, written.spec)
    return next(v for v in found if v.runtime == "transformers")


def check(source: Path, folder: Path, choose: Any, dtype: torch.dtype) -> None:
    """Every weight as ours, rounded to the model's dtype; the logits of the model with ours."""
    written = compressed_models.write(source, folder / "out", choose, fmt="fp8")
    model = load(written.folder, dtype=dtype)
    found = logits(model)
    plain(written, source, folder / "plain", rounded=False)
    expected = load(folder / "plain", dtype=dtype)
    state = model.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert (found - logits(expected)).abs().max() <= 1e-5
    assert verdict_of(written).verdict == "yes"
    weights = open_weights(Checkpoint.open(written.folder))
    for name, tensor in written.quantized.items():
        assert torch.equal(weights.read(name), tensor.dequantize(dtype)), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_in_the_dtype_of_the_checkpoint(source: Any, dtype: str, tmp_path: Path) -> None:
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    check(source(dtype=dtype), tmp_path, BLOCK, kinds[dtype])


def test_blocks_of_128_larger_than_the_weight(source: Any, tmp_path: Path) -> None:
    check(source(dtype="fp32"), tmp_path, FP8, torch.float32)


@pytest.mark.parametrize("family", [*LINEAR, *MIXTURES])
def test_families(source: Any, family: str, tmp_path: Path) -> None:
    # Rows of what makes the latent and its rotated key: 64, of whole blocks as others'.
    options = {"qk_rope_head_dim": 32} if family == "deepseek_v3" else {}
    check(source(family, dtype="fp32", **options), tmp_path, BLOCK, torch.float32)


def _no_down(linear: LinearSpec) -> QuantScheme | None:
    return None if linear.role == "down" else BLOCK


def test_modules_that_stay_dense(source: Any, tmp_path: Path) -> None:
    check(source(dtype="fp32"), tmp_path, _no_down, torch.float32)


EDGES = {"hidden_size": 144, "head_dim": 36}  # a block of 128 and one of 16


@pytest.mark.parametrize(
    ("family", "options", "choose", "reason"),
    [
        ("llama", EDGES, FP8, "those of 128 at the edge are not; use format compressed-tensors"),
        ("gpt2", {}, BLOCK, "is a Conv1D, whose weight it expects in the source's order"),
        ("llama", {}, PRESETS["FP8"], "the scale of a whole weight under another name"),
    ],
)
def test_what_we_say_it_refuses_it_refuses(
    source: Any, family: str, options: Any, choose: QuantScheme, reason: str, tmp_path: Path
) -> None:
    """Or, for blocks at the edge, computes wrongly."""
    folder = source(family, dtype="fp32", **options)
    written = compressed_models.write(folder, tmp_path / "out", choose, fmt="fp8")
    assert verdict_of(written).verdict == "no"
    assert reason in verdict_of(written).reason
    expected = logits(plain(written, folder, tmp_path / "plain", rounded=False))
    try:
        found = logits(load(written.folder))
    except (RuntimeError, ValueError):
        return
    assert (found - expected).abs().max() > 0.5


def test_modelopt_is_taken_for_weights(source: Any, tmp_path: Path) -> None:
    """The reason for our "no": it loads codes as they are and says so in a warning only."""
    folder = source(dtype="fp32")
    written = compressed_models.write(folder, tmp_path / "out", PRESETS["W8A16"], fmt="modelopt")
    expected = logits(plain(written, folder, tmp_path / "plain", rounded=False))
    assert (logits(load(written.folder)) - expected).abs().max() > 0.5
    schemes = {name: t.scheme for name, t in written.quantized.items()}
    found = runtimes("modelopt", schemes, written.spec)
    assert {v.verdict for v in found} == {"no"}
