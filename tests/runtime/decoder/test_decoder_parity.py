"""The engine's decoder computes what transformers computes: logits in fp32, and greedy tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import tiny_models
from helpers.engine.flat_runs import Runs, load
from helpers.forward_cases import CASES, LONGROPE, plain_greedy, rope, text, transformers_model


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    folder = tiny_models.make(family, tmp_path, **{"dtype": "fp32", **options})
    model, ids = transformers_model(folder), text()
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    runs = Runs(load(folder), texts=1, most=64)
    assert (runs.whole(ids.tolist()) - want).abs().max() < 1e-5
    prompt = ids[:12].tolist()
    assert runs.greedy(prompt, 20) == plain_greedy(model, prompt, 20)


@pytest.mark.parametrize("family", tiny_models.TABLED)
def test_bf16_rounds_where_transformers_rounds(family: str, tmp_path: Path) -> None:
    folder = tiny_models.make(family, tmp_path, dtype="bf16")
    model, ids = transformers_model(folder, torch.bfloat16), text()
    exact = transformers_model(folder)
    with torch.no_grad():
        want, truth = (x(ids[None]).logits[0].float() for x in (model, exact))
    got = Runs(load(folder, torch.bfloat16), texts=1, most=64).whole(ids.tolist())
    assert got.dtype == torch.float32
    # As far from the truth as transformers is, give or take: the same places, other sums.
    assert (got - truth).norm() < 1.2 * (want - truth).norm()


def test_a_decoder_beside_a_vision_tower(tmp_path: Path) -> None:
    """As hub checkpoints of gemma3 have it."""
    text_only = tiny_models.make("gemma3_text", tmp_path / "text", dtype="fp32", tied=True)
    whole = tmp_path / "whole"
    whole.mkdir()
    tensors = load_file(text_only / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_tower.layers.0.self_attn.q_proj.weight"] = torch.zeros(4, 4)
    save_file(renamed, whole / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((text_only / "config.json").read_text())
    nested = {"model_type": "gemma3", "text_config": config}
    (whole / "config.json").write_text(json.dumps(nested))
    ids = text().tolist()
    got, want = (Runs(load(folder), texts=1, most=64).whole(ids) for folder in (whole, text_only))
    assert torch.equal(got, want)


def test_a_trained_model(demo_model: Path) -> None:
    model, ids = transformers_model(demo_model), text(96)
    runs = Runs(load(demo_model), texts=1, most=128, block_size=16)
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    assert (runs.whole(ids.tolist()) - want).abs().max() < 1e-4
    prompt = ids[:8].tolist()
    assert runs.greedy(prompt, 20) == plain_greedy(model, prompt, 20)


@pytest.mark.parametrize("prompt", [30, 14], ids=["longer", "grows longer"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 3.0}),
        (
            "qwen2",
            {
                "rope_type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + 0.5 * i for i in range(8)],
                "original_max_position_embeddings": 16,
                "factor": 8.0,
            },
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_texts_beyond_the_length_that_changes_the_frequencies(
    family: str, kind: dict[str, Any], prompt: int, tmp_path: Path
) -> None:
    """transformers with a cache: a forward of the prompt, then one for each token."""
    context = 16 if kind["rope_type"] == "dynamic" else 128
    options = {**rope(**kind), "max_position_embeddings": context}
    folder = tiny_models.make(family, tmp_path, dtype="fp32", **options)
    model, ids = transformers_model(folder), text(40).tolist()
    runs = Runs(load(folder), texts=1, most=64)
    with torch.no_grad():
        out = model(torch.tensor([ids[:prompt]]), use_cache=True)
        want = [out.logits[0]]
        for token in ids[prompt:]:
            out = model(torch.tensor([[token]]), past_key_values=out.past_key_values)
            want.append(out.logits[0])
    got = [runs.whole(ids[:prompt])]
    for at in range(prompt, len(ids)):
        got += runs.step([(0, ids[at : at + 1], at, prompt)])
    assert (torch.cat(got) - torch.cat(want)).abs().max() < 1e-5


def test_phi3_computed_anew_where_it_outgrows_its_short_frequencies(tmp_path: Path) -> None:
    """What `generate` of transformers does: all frequencies are the long ones from there on."""
    options = LONGROPE | {"original_max_position_embeddings": 16}
    folder = tiny_models.make("phi3", tmp_path, dtype="fp32", **options)
    model, prompt = transformers_model(folder), text(10).tolist()
    ids = torch.tensor([prompt])
    want = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=tiny_models.VOCAB,
    )
    decoder = load(folder)
    runs, found, given = Runs(decoder, texts=1, most=64), list(prompt), len(prompt)
    logits = runs.whole(found)
    while len(found) < 30:
        found.append(int(logits[-1].argmax()))
        if decoder.how.variant(len(found)) != decoder.how.variant(given):
            given = len(found)
            logits = runs.whole(found)
        else:
            (logits,) = runs.step([(0, found[-1:], len(found) - 1, given)])
    assert given == 17
    assert found == want[0].tolist()
