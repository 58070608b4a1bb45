"""The table of carriers against transformers' own classes, on the meta device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError

from compress.arch.families.table import FAMILIES
from compress.arch.resize.carriers import CARRIERS, FITS, MISTRAL
from compress.arch.resize.config import resized
from compress.arch.resize.cut import Kept
from compress.arch.resize.shape import Shape
from helpers.resizing.resized_models import (
    cut_model,
    load,
    logits,
    logits_of,
    read,
    without_heads,
    write,
)
from helpers.tiny_models import LANDINGS, TABLED

WIDTH = 16
REFUSALS = (ValueError, StrictDataclassClassValidationError)
SMALL = {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8, "num_local_experts": 2}
ALONE = {**SMALL, "num_experts_per_tok": 1, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def made(family: str, **settings: Any) -> Any:
    """transformers' class without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **ALONE, **settings))


def takes(family: str, hidden: int, heads: int) -> bool:
    """Whether the class has so many heads of 16 numbers beside this hidden."""
    width = {} if CARRIERS[family].heads == "exact" else {"head_dim": WIDTH}
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads}
    try:
        model = made(family, **sizes, **width)
    except REFUSALS:
        return False
    output = next(row.disk for row in FAMILIES[family].attention if row.role == "o")
    shapes = [tuple(x.shape) for n, x in model.named_parameters() if n.endswith(f"{output}.weight")]
    return shapes[0] in ((hidden, heads * WIDTH), (heads * WIDTH, hidden))


def test_every_family_has_a_row() -> None:
    assert set(CARRIERS) == set(FAMILIES)


# Heads of latent attention do not go.
@pytest.mark.parametrize("family", [x for x in (*TABLED, *LANDINGS) if x != "deepseek_v3"])
def test_the_table_says_what_the_classes_take(family: str) -> None:
    tried = [(64, 4), (64, 3), (64, 2), (48, 3)]
    fits = FITS[CARRIERS[family].heads]
    assert [takes(family, *x) for x in tried] == [fits(*x, WIDTH) for x in tried]


@pytest.mark.parametrize(("hidden", "heads"), [(64, 4), (72, 4), (64, 3), (80, 4)])
def test_phi3_counts_the_factors_of_its_rotation_by_hidden(hidden: int, heads: int) -> None:
    factors = [1.0] * (WIDTH // 2)
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads}
    rule = FITS[CARRIERS["phi3"].factors or "any"]
    try:
        made("phi3", **sizes, head_dim=WIDTH, rope_scaling=rope)
    except REFUSALS:
        assert not rule(hidden, heads, WIDTH)
    else:
        assert rule(hidden, heads, WIDTH)


def test_where_mistral_assumes_something_else_than_llama() -> None:
    from transformers import LlamaConfig, MistralConfig

    llama, mistral = LlamaConfig().to_dict(), MistralConfig().to_dict()
    differ = {key for key in llama.keys() | mistral.keys() if llama.get(key) != mistral.get(key)}
    sizes = {"intermediate_size", "num_key_value_heads"}  # written as the source has them
    assert differ == {"model_type", *MISTRAL.add, *MISTRAL.fill, *sizes, *MISTRAL.drop} - {
        "layer_types"
    }
    assert {key: llama[key] for key in MISTRAL.fill} == MISTRAL.fill


def test_a_llama_whose_heads_do_not_divide_hidden_becomes_a_mistral(
    tiny: Any, tmp_path: Path
) -> None:
    """With keys of its own for each head, as its config does not say."""
    folder = tiny("llama", dtype="fp32", num_key_value_heads=4, attention_bias=False)
    source = read(folder)
    for key in ("num_key_value_heads", "max_position_embeddings", "head_dim"):
        del source.config[key]
    kept = {0: Kept(heads=torch.tensor([0, 2, 3])), 1: Kept(kv_heads=torch.tensor([0, 1, 2]))}
    found = resized(source.config, source.spec, Shape(heads=3))
    assert found.notes == (
        (
            "the result is a mistral (MistralForCausalLM), which computes the same: llama takes no"
            " hidden 64 with 3 heads"
        ),
    )
    assert found.config["architectures"] == ["MistralForCausalLM"]
    assert found.config["sliding_window"] is None
    assert found.config["head_dim"] == WIDTH
    assert found.config["num_key_value_heads"] == 3
    assert not found.config.keys() & set(MISTRAL.drop)
    write(tmp_path / "cut", *cut_model(source, Shape(heads=3), kept.__getitem__))
    model = load(tmp_path / "cut")
    assert type(model).__name__ == "MistralForCausalLM"
    wanted = logits_of(source, without_heads(source, kept), tmp_path)
    torch.testing.assert_close(logits(model), wanted, atol=1e-5, rtol=1e-5)


def test_a_llama_with_heads_that_divide_hidden_stays_a_llama(sources: Any) -> None:
    source = sources("llama")
    found = resized(source.config, source.spec, Shape(heads=2))
    assert (found.config["model_type"], found.notes) == ("llama", ())


LINES = [
    (
        "llama",
        {"attention_bias": True},
        Shape(heads=3, kv_heads=1),
        (
            "heads is 3; with kv_heads 1 it must be 1 or 2, as each group keeps equally many"
            " query heads of its 2"
        ),
    ),
    (
        "llama",
        {"mlp_bias": True},
        Shape(hidden=50),
        (
            "llama takes no hidden 50 with 4 heads: hidden must be a multiple of heads in a model"
            " with biases; 2 heads fit hidden 50, and hidden 40, 44, 48, 52, 56 or 60 fits 4 heads;"
            " a prune_width with both cuts them together"
        ),
    ),
    (
        "gemma2",
        {},
        Shape(hidden=63),
        (
            "gemma2 takes no hidden 63 with 4 heads: hidden must be a multiple of heads;"
            " hidden 44, 48, 52, 56, 60 or 64 fits 4 heads; a prune_width with both cuts them"
            " together"
        ),
    ),
    (
        "gpt2",
        {},
        Shape(heads=3),
        (
            "gpt2 takes no hidden 64 with 3 heads: heads × 16 must be hidden; 4 heads fit hidden"
            " 64, and hidden 48 fits 3 heads; a prune_width with both cuts them together"
        ),
    ),
    (
        "opt",
        {},
        Shape(hidden=60),
        (
            "opt takes no hidden 60 with 4 heads: heads × 16 must be hidden; hidden 64 fits 4"
            " heads; a prune_width with both cuts them together"
        ),
    ),
    (
        "phi3",
        {"rope_scaling": {"short_factor": []}},
        Shape(heads=2),
        (
            "phi3 takes no hidden 64 with 2 heads: hidden // heads must be 16, half of which are"
            " its factors of rotation; 4 heads fit hidden 64, and hidden 32 or 33 fits 2 heads;"
            " a prune_width with both cuts them together"
        ),
    ),
]


@pytest.mark.parametrize(("family", "config", "shape", "line"), LINES, ids=range(len(LINES)))
def test_what_no_class_takes_is_refused_with_what_fits(
    family: str, config: dict[str, Any], shape: Shape, line: str, refusal: Any
) -> None:
    assert refusal(family, config, shape) == line
