"""Decoders in no table in transformers through the real compressed-tensors: a table of what opened
classes promised, and what loading shows."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.verbs import make_plan, run
from helpers import unlisted_models
from helpers.in_transformers import load, logits
from helpers.short_runs import W4, recipe
from helpers.unlisted_models import READING, RUNNING

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("compressed_tensors")]

RTN16 = {"method": "rtn", **W4, "group_size": 16}
CASES = {
    **dict.fromkeys(RUNNING, ()),
    **{family: leaves for family, (_, leaves) in READING.items()},
}


@pytest.mark.parametrize("family", CASES)
def test_what_is_expected_loads(family: str, tmp_path: Path) -> None:
    """Where the class reads weights itself, without those that the refusal names."""
    source = unlisted_models.make(family, tmp_path / "source")
    asked = recipe({**RTN16, "ignore": ["lm_head", "router", *CASES[family]]})
    verdicts = {v.runtime: v.verdict for v in make_plan(asked, source).runtimes}
    assert verdicts["transformers"] == "expected"
    run(asked, source, tmp_path / "out")
    weights = open_weights(Checkpoint.open(tmp_path / "out"))
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_bytes((source / "config.json").read_bytes())
    read = {name: weights.read(name).float() for name in Checkpoint.open(source).tensors}
    save_file(read, dense / "model.safetensors", metadata={"format": "pt"})
    found, expected = logits(load(tmp_path / "out")), logits(load(dense))
    assert (found - expected).abs().max() <= 1e-5
    assert (found - logits(load(source))).abs().max() > 1e-2


@pytest.mark.parametrize("family", READING)
def test_what_is_refused_does_not_load(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.plan import plan

    monkeypatch.setattr(plan, "opened", lambda config, spec, packed, fmt, *, streamed: spec)
    source = unlisted_models.make(family, tmp_path / "source")
    run(recipe(RTN16), source, tmp_path / "out")
    with pytest.raises(AttributeError, match="weight"):
        logits(load(tmp_path / "out"))
