"""Decoders in GGUF's words: the settings, the order of rows, and what has no word."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.arch.forward.forward import describe_forward
from compress.errors import CheckpointError
from compress.formats.gguf.arches import ARCHES
from compress.formats.gguf.layout import Piece
from compress_exporters.gguf.model import check_model
from helpers import tiny_models
from helpers.exporters.gguf_files import planned, source, tiny
from helpers.forward_cases import LLAMA3, YARN, rope


def keys(folder: Path, family: str, **options: Any) -> dict[str, Any]:
    """Keys of the file, the architecture's name left out."""
    plan = planned(tiny(folder, family, **options))
    return {k.removeprefix(f"{plan.arch.name}."): v for k, v in plan.fields}


def test_settings_of_a_llama(tmp_path: Path) -> None:
    found = keys(tmp_path / "some-model", "llama")
    assert found["general.architecture"] == "llama"
    assert found["general.name"] == "some-model"
    assert found["context_length"] == 128
    assert (found["embedding_length"], found["block_count"]) == (64, 2)
    assert (found["attention.head_count"], found["attention.head_count_kv"]) == (4, 2)
    assert (found["attention.key_length"], found["rope.dimension_count"]) == (16, 16)
    assert (found["feed_forward_length"], found["vocab_size"]) == (96, tiny_models.VOCAB)
    assert "general.quantization_version" not in found


def test_a_model_in_the_cache_has_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "models--me--some-model" / "snapshots" / "0123456789abcdef"
    assert keys(folder, "llama")["general.name"] == "some-model"


def test_a_result_that_is_still_worked_on_has_its_later_name(tmp_path: Path) -> None:
    """The artifacts of a recipe are made of OUT.partial."""
    assert keys(tmp_path / "my-int4.partial", "llama")["general.name"] == "my-int4"


def test_what_belongs_to_no_decoder_is_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {"vision.tower.weight": torch.ones(2), "mtp.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    (note,) = planned(source(tmp_path)).notes
    assert note.startswith("left out, as no part of the decoder, are 2 of the tensors: ")
    assert "mtp.weight" in note


def test_settings_of_mixtures(tmp_path: Path) -> None:
    for family, width in (("mixtral", 96), ("qwen3_moe", 32)):
        found = keys(tmp_path / family, family)
        names = ("expert_count", "expert_used_count", "expert_feed_forward_length")
        assert [found[name] for name in names] == [4, 2, width]


def test_gemmas_windows_and_caps(tmp_path: Path) -> None:
    found = keys(tmp_path / "2", "gemma2", tied=True, sliding_window=5)
    assert found["attention.sliding_window"] == 5
    assert "attention.sliding_window_pattern" not in found
    assert (found["attn_logit_softcapping"], found["final_logit_softcapping"]) == (50.0, 30.0)
    found = keys(tmp_path / "3", "gemma3_text")  # two layers: a window, then none
    assert found["attention.sliding_window_pattern"] == 2
    assert (found["rope.freq_base"], found["rope.freq_base_swa"]) == (1e6, 1e4)


def test_a_window_that_the_reader_lacks_bounds_the_context(tmp_path: Path) -> None:
    plan = planned(tiny(tmp_path, "mistral", sliding_window=40))
    assert ("llama.context_length", 40) in plan.fields
    assert plan.notes == (
        "GGUF's llama has no window; the file is for 40 positions, for which none is needed",
    )


def test_a_window_of_the_whole_context_is_none(tmp_path: Path) -> None:
    """In some layers too, which the reader could not have otherwise."""
    options = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}
    plan = planned(tiny(tmp_path, "qwen2", **options))
    assert ("qwen2.context_length", 128) in plan.fields


def test_fewer_positions_when_asked(tmp_path: Path) -> None:
    llama, gpt2 = tiny(tmp_path / "llama"), tiny(tmp_path / "gpt2", "gpt2")
    assert ("llama.context_length", 50) in planned(llama, max_context=50).fields
    assert ("llama.context_length", 128) in planned(llama, max_context=500).fields
    # Its table of positions has as many rows as the key says.
    assert ("gpt2.context_length", 128) in planned(gpt2, max_context=50).fields


def test_rotations(tmp_path: Path) -> None:
    found = keys(tmp_path / "linear", "llama", **rope(rope_type="linear", factor=4.0))
    assert (found["rope.scaling.type"], found["rope.scaling.factor"]) == ("linear", 4.0)
    found = keys(tmp_path / "yarn", "qwen2", **rope(**YARN))
    assert found["rope.scaling.type"] == "yarn"
    assert found["rope.scaling.original_context_length"] == 32
    plan = planned(tiny(tmp_path / "llama3", **rope(**LLAMA3)))
    (factors,) = (piece for piece in plan.pieces if piece.name == "rope_freqs.weight")
    assert list(factors.values) == sorted(factors.values)
    assert 1 < factors.values[0] < factors.values[-1] == LLAMA3["factor"]


def test_longrope_says_which_factors_count(tmp_path: Path) -> None:
    how = {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
        },
        "original_max_position_embeddings": 64,
    }
    plan = planned(tiny(tmp_path, "phi3", **how))
    found = {piece.name: piece.values for piece in plan.pieces if piece.values}
    assert found == {
        "rope_factors_long.weight": (4.0,) * 8,
        "rope_factors_short.weight": (1.0,) * 8,
    }
    assert plan.notes == (
        (
            "longrope: llama.cpp takes the factors of long texts when it is opened for more than 64"
            " positions, transformers when a text is longer"
        ),
    )


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "family": (
        "opt",
        {},
        (
            "model type 'opt' has no architecture in GGUF that is known here; known are"
            f" {', '.join(ARCHES)}; take onnx"
        ),
    ),
    "family that no graph has either": (
        "starcoder2",
        {},
        (
            "model type 'starcoder2' has no architecture in GGUF that is known here; known are"
            f" {', '.join(ARCHES)}"
        ),
    ),
    "activation": (
        "llama",
        {"hidden_act": "gelu"},
        "the activation is 'gelu'; GGUF's llama computes silu, take onnx",
    ),
    "rotation": (
        "llama",
        rope(rope_type="dynamic", factor=2.0),
        (
            "rope_type is 'dynamic'; GGUF's llama knows default, linear, llama3, yarn, longrope,"
            " take onnx, or write the model without it"
        ),
    ),
    "another yarn": (
        "llama",
        rope(**YARN, attention_factor=1.5),
        (
            "yarn's attention_factor is 1.5 and truncate true; GGUF's readers compute with 1.13863"
            " and true, take onnx"
        ),
    ),
    "unrotated layers": (
        "smollm3",
        {"no_rope_layers": [1, 0]},
        (
            "layer 1 does not rotate queries and keys; in GGUF's smollm3 every layer rotates but"
            " each 4th; take onnx"
        ),
    ),
    "biases": (
        "qwen3",
        {"bias": True},
        "model.layers.0.self_attn.q_proj has a bias; GGUF's qwen3 has none there, take onnx",
    ),
    "no biases": (
        "gpt_neox",
        {"bias": False},
        (
            "gpt_neox.layers.0.attention.query_key_value has no bias; GGUF's gptneox needs one"
            " there, take onnx"
        ),
    ),
    "scale": (
        "gemma3_text",
        {"query_pre_attn_scalar": 64},
        (
            "scores of layer 0 are multiplied by 0.125; GGUF's gemma3 computes with 0.25 here, take"
            " onnx"
        ),
    ),
    "no caps": (
        "gemma2",
        {"tied": True, "attn_logit_softcapping": None},
        "scores or logits are not capped; GGUF's gemma2 always caps both, take onnx",
    ),
    "caps": (
        "gemma3_text",
        {"final_logit_softcapping": 2.0},
        "scores or logits are capped, at 2; GGUF's gemma3 caps none, take onnx",
    ),
    "head": (
        "gemma2",
        {},
        (
            "lm_head.weight is not the embedding; GGUF's gemma2 has no output head of its own, take"
            " onnx"
        ),
    ),
    "windows": (
        "gemma3_text",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_hidden_layers": 3,
        },
        (
            "windows of the layers are [None, 32, 32]; GGUF's gemma3 has one in every layer but"
            " each n-th, take onnx"
        ),
    ),
    "dense layers": (
        "qwen3_moe",
        {"mlp_only_layers": [0]},
        "model.layers.0 has no experts; GGUF's qwen3moe has them in every layer, take onnx",
    ),
    "shares": (
        "qwen3_moe",
        {"norm_topk_prob": False},
        (
            "norm_topk_prob is false; in GGUF's qwen3moe the chosen experts' weights add up to 1,"
            " take onnx"
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_gguf_has_no_word_for(case: str, tmp_path: Path) -> None:
    family, options, words = REFUSED[case]
    checkpoint = tiny(tmp_path, family, **options)
    with pytest.raises(CheckpointError) as problem:
        planned(checkpoint)
    assert str(problem.value) == words


def test_sizes_and_positions_that_are_refused(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path, "phi3")
    arch, spec = ARCHES["phi3"], checkpoint.spec
    how = describe_forward(checkpoint.checkpoint.config, spec)
    with pytest.raises(CheckpointError, match="4 heads of 16 numbers are not the 80 of the residu"):
        check_model(replace(checkpoint, spec=replace(spec, hidden=80)), how, arch)
    with pytest.raises(CheckpointError, match=r"config\.json does not say how many positions"):
        check_model(replace(checkpoint, spec=replace(spec, context=0)), how, arch)


def test_rows_of_neighbours() -> None:
    """Halves of a head, which turn against each other, lie beside each other in the file."""
    piece = Piece("x", ("x",), (8, 1), order="neighbours", heads=2)
    rows = piece.rows()
    assert rows is not None
    assert rows.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_rows_of_parts() -> None:
    piece = Piece("x", ("x",), (12, 1), order="parts", heads=2)
    rows = piece.rows()
    assert rows is not None
    assert rows.tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


@pytest.mark.parametrize("family", ARCHES)
def test_every_tensor_has_a_place(family: str, tmp_path: Path) -> None:
    checkpoint = tiny(
        tmp_path,
        family,
        **({"no_rope_layers": [1, 1]} if family == "smollm3" else {})
        | ({"tied": True} if family == "gemma2" else {}),
    )
    plan = planned(checkpoint)
    used = [name for piece in plan.pieces for name in piece.sources]
    assert set(used) == set(checkpoint.checkpoint.tensors)
    assert len(used) == len(set(used))
    assert len({piece.name for piece in plan.pieces}) == len(plan.pieces)


def test_a_head_is_stored_where_the_reader_wants_one(tmp_path: Path) -> None:
    for family in ("olmo2", "gpt_neox"):
        plan = planned(tiny(tmp_path / family, family, tied=True))
        by_name = {piece.name: piece.sources for piece in plan.pieces}
        assert by_name["output.weight"] == by_name["token_embd.weight"]
    plan = planned(tiny(tmp_path / "llama", tied=True))
    assert "output.weight" not in {piece.name for piece in plan.pieces}


def test_a_head_equal_to_the_embedding_is_left_out_where_there_is_no_place(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    tiny(folder, "gemma2")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.clone(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors")
    plan = planned(source(folder))
    assert "output.weight" not in {piece.name for piece in plan.pieces}
