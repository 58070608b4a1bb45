"""untie: a head of its own with the embedding's values computes what the tied one did."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from compress.errors import CheckpointError
from compress.verbs import make_plan, run
from helpers.in_transformers import logits
from helpers.short_runs import recipe

UNTIE = {"method": "untie"}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_the_model_computes_what_it_did(tiny, tmp_path: Path, family: str) -> None:
    source = tiny(family, tie_word_embeddings=True)
    report = run(recipe(UNTIE), source, tmp_path / "out")
    plan = make_plan(recipe(UNTIE), source)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    head, embedding = plan.spec.head, plan.spec.embedding
    assert head is not None
    assert torch.equal(tensors[head], tensors[embedding])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    models = [AutoModelForCausalLM.from_pretrained(x).float() for x in (source, tmp_path / "out")]
    out = models[1]
    assert out.get_output_embeddings().weight is not out.get_input_embeddings().weight
    assert torch.equal(*(logits(model) for model in models))
    assert report.result.params - report.source.params == tensors[embedding].numel()
    assert "untied head" in report.result.architecture


def test_a_head_of_its_own_is_no_longer_left_to_the_embedding(tiny, tmp_path: Path) -> None:
    """A stage behind it takes the head, and what comes out is what naming the head alone gives."""
    source = tiny("llama", tie_word_embeddings=True)
    stage = {"method": "rtn", "scheme": "W8A16", "targets": ["lm_head"], "ignore": []}
    run(recipe(UNTIE, stage), source, tmp_path / "both")
    run(recipe(stage), source, tmp_path / "alone")
    found = [(tmp_path / x / "model.safetensors").read_bytes() for x in ("both", "alone")]
    assert found[0] == found[1]


def test_a_head_of_its_own_already_is_refused_before_work(tiny, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        run(recipe(UNTIE), tiny("llama", tie_word_embeddings=False), tmp_path / "out")
    assert str(caught.value) == (
        "recipe:3: stages[0]: the model has an output head of its own already (lm_head.weight);"
        " take the stage out"
    )
    assert list(tmp_path.iterdir()) == []
