"""Scales of the key/value cache: names, config, both ways, and where they cannot be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec
from compress.checkpoint.reader import Checkpoint
from compress.errors import CheckpointError, RecipeError
from compress.formats import (
    FORMATS,
    FP8_CACHE,
    INT8_CACHE,
    kv_encode,
    kv_layout,
    open_coded,
    open_weights,
)
from compress.formats.compressed_tensors.config_read import parse
from compress.formats.oddities import oddities
from compress.formats.validate import Expected, validate
from compress.quant.scheme import ActivationScheme, QuantScheme
from helpers import compressed_models, tiny_models

G4 = QuantScheme(group_size=32)
CACHES = [FP8_CACHE, INT8_CACHE]


def spec_of(family: str, folder: Path) -> DecoderSpec:
    checkpoint = Checkpoint.open(tiny_models.make(family, folder))
    return describe(checkpoint.config, checkpoint.shapes)


@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "model.layers.{}.self_attn"), ("phi3", "model.layers.{}.self_attn")],
)
def test_names_and_what_is_encoded(family: str, attention: str, tmp_path: Path) -> None:
    spec = spec_of(family, tmp_path)
    planned = kv_layout(spec, "F32")
    assert planned == [
        (f"{attention.format(i)}.{part}_scale", "F32", (1,)) for i in range(2) for part in "kv"
    ]
    parts = kv_encode(spec.blocks[1], torch.tensor(0.5), torch.tensor([[0.25]]))
    assert {name: t.tolist() for name, t in parts.items()} == {
        f"{attention.format(1)}.k_scale": [0.5],
        f"{attention.format(1)}.v_scale": [0.25],
    }


def test_a_block_without_known_keys(tmp_path: Path) -> None:
    spec = spec_of("llama", tmp_path)
    blind = replace(spec.blocks[0], linears=tuple(x for x in spec.linears() if x.role == "o"))
    with pytest.raises(RecipeError, match=r"^model.layers.0: no key projection is known in it"):
        kv_layout(replace(spec, blocks=(blind,)), "F32")


@pytest.mark.parametrize("cache", CACHES)
def test_the_config_says_it(cache: ActivationScheme, tmp_path: Path) -> None:
    spec = spec_of("llama", tmp_path)
    config = FORMATS["compressed-tensors"].config(spec, {}, {}, kv_cache=cache)
    assert config is not None
    assert config["format"] == "dense"
    assert config["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": cache.type,
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }
    assert parse({"quantization_config": config}).kv_cache == cache


def test_what_cannot_be_said(tmp_path: Path) -> None:
    spec = spec_of("llama", tmp_path)
    with pytest.raises(RecipeError, match="kv_cache: a4 static cannot be stored; 8 bits with one"):
        FORMATS["compressed-tensors"].config(spec, {}, {}, kv_cache=replace(INT8_CACHE, bits=4))
    with pytest.raises(RecipeError, match="a dense checkpoint has no place for the scales of the"):
        FORMATS["dense"].config(spec, {}, {}, kv_cache=FP8_CACHE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 4, "type": "int"}, r"kv_cache_scheme.num_bits is 4; this version reads 8"),
        ({"dynamic": True}, r"kv_cache_scheme.dynamic is True; this version reads False"),
        ({"strategy": "attn_head"}, r"strategy is 'attn_head'; this version reads .*'tensor'"),
        ({"strategy": "token"}, r"kv_cache_scheme: activation granularity is 'token' with"),
        ({"symmetric": False}, r"kv_cache_scheme.symmetric is False; this version reads True"),
    ],
)
def test_foreign_caches_are_refused(changes: dict[str, Any], message: str) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, **changes}
    with pytest.raises(CheckpointError, match=message):
        parse({"quantization_config": {"config_groups": {}, "kv_cache_scheme": scheme}})


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Expected]:
    source = tiny_models.make("llama", tmp_path / "source")
    result = compressed_models.write(source, tmp_path / "out", G4, kv_cache=FP8_CACHE, kv_scale=0.5)
    schemes = {name: t.scheme for name, t in result.quantized.items()}
    tensors = Checkpoint.open(source).tensors
    expected = Expected(
        tensors, result.spec, schemes, "compressed-tensors", kv_cache=FP8_CACHE, kv_dtype="BF16"
    )
    return result.folder, expected


def rename(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({k.replace(old, new): v for k, v in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("style", ["{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale"])
def test_read_from_wherever_tools_put_it(style: str, written: tuple[Path, Expected]) -> None:
    folder, _ = written
    for part in "kv":
        rename(folder, f"self_attn.{part}_scale", f"self_attn.{style.format(part, part)}")
    weights = open_weights(Checkpoint.open(folder))
    assert weights.kv_cache == FP8_CACHE
    assert not any("scale" in name for b in weights.spec.blocks for name in b.unrecognised)
    for block in weights.spec.blocks:
        cache = weights.cache(block)
        assert cache is not None
        assert [part.scheme for part in cache] == [FP8_CACHE, FP8_CACHE]
        assert [part.scale.tolist() for part in cache] == [[0.5], [0.5]]


def test_a_scale_that_is_no_number_is_refused(written: tuple[Path, Expected]) -> None:
    folder, expected = written
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.v_scale"
    save_file({**tensors, name: tensors[name] * torch.nan}, folder / "model.safetensors")
    weights = open_weights(Checkpoint.open(folder))
    with pytest.raises(CheckpointError, match=rf"{name} is bfloat16 \[1\] with \[nan\]"):
        weights.cache(weights.spec.blocks[1])
    assert validate(Checkpoint.open(folder), expected) == [
        f"tensor {name} has scales that are not finite and positive"
    ]


@pytest.mark.parametrize(("lost", "block"), [("k", 0), ("v", 0), ("kv", 1)])
def test_a_scale_that_is_lost_is_named(
    lost: str, block: int, written: tuple[Path, Expected]
) -> None:
    folder, _ = written
    names = [f"model.layers.{block}.self_attn.{part}_scale" for part in lost]
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    save_file(kept, folder / "model.safetensors")
    weights = open_weights(Checkpoint.open(folder))
    assert weights.cache(weights.spec.blocks[1 - block]) is not None
    with pytest.raises(CheckpointError) as caught:
        weights.cache(weights.spec.blocks[block])
    assert str(caught.value) == (
        f"quantization_config has scales of a key/value cache, but tensor {names[0]} is missing;"
        " the checkpoint is incomplete, so download it again"
    )


def test_a_cache_of_which_only_the_config_speaks(written: tuple[Path, Expected]) -> None:
    folder, _ = written
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "self_attn.k_s" not in name}
    kept = {name: tensor for name, tensor in kept.items() if "self_attn.v_s" not in name}
    save_file(kept, folder / "model.safetensors")
    weights = open_coded(Checkpoint.open(folder))
    assert weights is not None
    assert [weights.cache(block) for block in weights.spec.blocks] == [None, None]
    assert oddities(weights)[-1] == (
        "quantization_config says that keys and values are quantized, but there are no scales: here"
        " they stay as they are"
    )


def test_validated_with_the_rest(written: tuple[Path, Expected]) -> None:
    folder, expected = written
    assert validate(Checkpoint.open(folder), expected) == []
    other = replace(expected, kv_cache=INT8_CACHE)
    assert validate(Checkpoint.open(folder), other) == [
        "quantization_config.kv_cache_scheme is not that of the scales which are stored"
    ]
    without = replace(expected, kv_cache=None)
    lines = validate(Checkpoint.open(folder), without)
    assert "tensor model.layers.0.self_attn.k_scale was written but belongs to nothing" in lines


def test_a_cache_beside_dense_weights(tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source")
    result = compressed_models.write(source, tmp_path / "out", lambda x: None, kv_cache=INT8_CACHE)
    tensors = Checkpoint.open(source).tensors
    expected = Expected(tensors, result.spec, {}, "compressed-tensors", kv_cache=INT8_CACHE)
    assert validate(Checkpoint.open(result.folder), expected) == []
    weights = open_weights(Checkpoint.open(result.folder))
    assert weights.activation(weights.spec.blocks[0].linears[0].name) is None
    both = weights.cache(weights.spec.blocks[0])
    assert both is not None
    assert both[0].scheme == INT8_CACHE
