"""Models whose heads are cut and whose stream is not narrow yet: no class takes them, and we read
them as what they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError

from compress.arch.describe import describe
from compress.arch.resize.between import KEY, is_between
from compress.arch.resize.config import resized
from compress.arch.resize.cut import Kept
from compress.arch.resize.shape import Shape
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.formats import open_weights
from compress.proof.own_reading import own_logits
from helpers.resizing.resized_models import (
    IDS,
    LAYERS,
    cut_model,
    load,
    logits_of,
    options_of,
    read,
    shapes,
    without_heads,
    write,
)

FACTORS = [1.0 + i / 8 for i in range(8)]
LONG = {"type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS}
OWN = {"num_key_value_heads": 4}
TIED: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt": {},
    "gpt_neox": {},
    "llama": {"num_key_value_heads": 4, "mlp_bias": True},
    "cwm": OWN,
    "gemma2": OWN,
    "gemma3_text": OWN,
    "phi3": {**OWN, "rope_scaling": LONG, "original_max_position_embeddings": 64},
}
REFUSALS = (ValueError, StrictDataclassClassValidationError)


QUICK = ("gpt2", "opt", "gemma2", "phi3")


@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=() if x in QUICK else pytest.mark.long) for x in TIED]
)
def test_we_read_what_the_class_refuses(tiny, tmp_path: Path, family: str) -> None:
    source = read(tiny(family, **{**options_of(family), **TIED[family]}))
    heads = torch.tensor([0, 1, 3])
    kept = {index: Kept(heads=heads, kv_heads=heads) for index in range(LAYERS)}
    config, state = cut_model(source, Shape(heads=3), kept.__getitem__, hidden=48)
    write(tmp_path / "cut", config, state)
    with pytest.raises(REFUSALS):
        load(tmp_path / "cut")
    weights = open_weights(Checkpoint.open(tmp_path / "cut"))
    found = torch.cat([own_logits(weights, ids[None]) for ids in IDS])
    wanted = logits_of(source, without_heads(source, kept), tmp_path)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_what_was_said_in_between_alone_is_gone_behind_it(sources: Any) -> None:
    source = sources("gpt2")
    kept = Kept(heads=torch.arange(3))
    config, state = cut_model(source, Shape(heads=3), lambda _: kept, hidden=48)
    assert is_between(config)
    assert (config["n_head"], config["head_dim"], config[KEY]) == (
        3,
        16,
        {"n_head": 4, "head_dim": None},
    )
    spec = describe(config, shapes(state))
    found = resized(config, spec, Shape(hidden=48)).config
    assert found == resized(source.config, source.spec, Shape(heads=3, hidden=48)).config


def test_a_class_that_takes_both_is_as_it_was(sources: Any) -> None:
    source = sources("qwen2")
    shape = Shape(heads=2, kv_heads=1)
    found = resized(source.config, source.spec, shape, 48)
    assert found == resized(source.config, source.spec, shape)


@pytest.mark.parametrize(
    ("family", "hidden", "fits"),
    [("gpt2", 50, ""), ("opt", 32, "2 heads fit hidden 32, and ")],
)
def test_what_does_not_go_together_is_refused(
    sources: Any, family: str, hidden: int, fits: str
) -> None:
    source = sources(family)
    with pytest.raises(CheckpointError) as refused:
        resized(source.config, source.spec, Shape(heads=3), hidden)
    assert str(refused.value) == (
        f"{family} takes no hidden {hidden} with 3 heads: heads × 16 must be hidden; {fits}hidden"
        " 48 fits 3 heads"
    )
