"""Whether the head is the embedding: config.json and tensors, and what loaders make of both."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec
from compress.checkpoint import Checkpoint
from compress.checkpoint.ties import contradiction, said, settled
from compress.errors import CheckpointError
from helpers import tiny_models

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def model(folder: Path, word: Any, head: str | None) -> tuple[Checkpoint, DecoderSpec]:
    """word: tie_word_embeddings, None for none. head: "same" as the embedding, "other", or None."""
    tiny_models.make("llama", folder, tied=True, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    config |= {} if word is None else {"tie_word_embeddings": word}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    if head is not None:
        tensors[HEAD] = tensors[EMBEDDING].clone() if head == "same" else -tensors[EMBEDDING]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint.open(folder)
    return checkpoint, describe(checkpoint.config, checkpoint.shapes)


@pytest.mark.parametrize(
    ("word", "head", "result", "odd"),
    [
        (True, None, True, None),
        (None, None, True, "config.json does not have tie_word_embeddings, and no output head"),
        (True, "same", True, "tie_word_embeddings is true, yet lm_head is stored: transformers"),
        (True, "other", False, "tie_word_embeddings is true, yet lm_head is stored: transformers"),
        (None, "same", None, None),
        (None, "other", False, None),
        (False, "same", False, None),
        (False, "other", False, None),
    ],
)
def test_what_is_written_says_what_is_stored(
    word: bool | None, head: str | None, result: bool | None, odd: str | None, tmp_path: Path
) -> None:
    checkpoint, spec = model(tmp_path, word, head)
    assert said(settled(checkpoint, spec).config) == result
    found = contradiction(checkpoint.config, spec)
    assert (found or "")[: len(odd or "")] == (odd or "")
    assert (found is None) == (odd is None)
    # A head that is about to be quantized is another tensor, whatever it is now.
    assert said(settled(checkpoint, spec, True).config) == (result if head is None else False)


@pytest.mark.parametrize(("word", "head"), [(True, "other"), (True, "same"), (True, None)])
def test_transformers_does_what_we_claim(word: bool, head: str | None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint, spec = model(tmp_path, word, head)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).get_output_embeddings().weight
    assert torch.equal(theirs, checkpoint.read(spec.head or spec.embedding))


def test_the_decoder_s_own_config_counts(tmp_path: Path) -> None:
    checkpoint, spec = model(tmp_path, None, "other")
    inner = {**checkpoint.config, "tie_word_embeddings": True}
    nested = {"text_config": inner, "tie_word_embeddings": False}
    assert said(nested) is True
    both = settled(replaced(checkpoint, nested), spec).config
    assert both["text_config"]["tie_word_embeddings"] is both["tie_word_embeddings"] is False


def replaced(checkpoint: Checkpoint, config: dict[str, Any]) -> Checkpoint:
    return Checkpoint(checkpoint.path, config, checkpoint.tensors, checkpoint.files)


def test_a_word_that_is_none() -> None:
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is 'yes'; it must be true or"):
        said({"tie_word_embeddings": "yes"})
