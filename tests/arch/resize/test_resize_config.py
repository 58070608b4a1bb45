"""config.json after a change of sizes: sizes, what is said of single blocks, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.arch.describe import describe
from compress.arch.families.table import FAMILIES
from compress.arch.forward.forward import describe_forward
from compress.arch.resize.config import resized
from compress.arch.resize.cut import Kept
from compress.arch.resize.entries import entries
from compress.arch.resize.shape import Shape
from compress.arch.sizes import SizeRule, read_sizes
from compress.arch.spec import DecoderSpec
from compress.errors import CheckpointError
from helpers.resizing.resized_models import (
    Source,
    clone,
    cut_model,
    load,
    logits,
    logits_of,
    read,
    shapes,
    write,
    writers,
)

LAYERS = 12
WINDOWED = {"sliding_window": 8, "use_sliding_window": True}
TYPES = ["full_attention", "sliding_attention", "sliding_attention"] * 4


def spec_of(family: str, config: dict[str, Any], spec: DecoderSpec) -> DecoderSpec:
    """With blocks as a config says; their tensors are those of the first."""
    rule = SizeRule(FAMILIES[family].defaults)
    sizes = read_sizes(config, rule).blocks
    blocks = (replace(spec.blocks[0], index=i, sizes=each) for i, each in enumerate(sizes))
    return replace(spec, blocks=tuple(blocks))


LAYERED: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {**WINDOWED, "max_window_layers": 5}),
    ("qwen2", {**WINDOWED, "layer_types": TYPES, "max_window_layers": 12}),
    ("qwen3", {**WINDOWED}),
    ("qwen3", {"use_sliding_window": False, "max_window_layers": 28}),
    ("gemma2", {"sliding_window": 8}),
    ("gemma3_text", {"sliding_window": 8}),
    ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}),
    ("gemma3_text", {"sliding_window": 8, "layer_types": TYPES, "_sliding_window_pattern": 6}),
    ("smollm3", {"no_rope_layer_interval": 3}),
    ("smollm3", {**WINDOWED}),
    ("smollm3", {**WINDOWED, "no_rope_layers": [1, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"decoder_sparse_step": 3, "mlp_only_layers": [2, 7]}),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 9]}),
    ("llama", {"layer_types": ["full_attention"] * LAYERS}),
]
LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "max_window_layers")


@pytest.mark.parametrize("kept", [(0, 1, 2, 3, 4, 5), (1, 3, 4, 5, 8, 9, 11), (10,)], ids=len)
@pytest.mark.parametrize(("family", "extra"), LAYERED)
def test_blocks_that_stay_compute_as_before(
    family: str, extra: dict[str, Any], kept: tuple[int, ...], sources: Any
) -> None:
    """By our reading of config.json, and by transformers'."""
    from transformers import AutoConfig

    source = sources(family)
    config = {k: v for k, v in source.config.items() if k not in LISTS}
    config |= {"num_hidden_layers": LAYERS, **extra}
    spec = spec_of(family, config, source.spec)
    found = resized(config, spec, Shape(layers=kept)).config
    after = spec_of(family, found, source.spec)
    assert [x.sizes for x in after.blocks] == [spec.blocks[i].sizes for i in kept]
    before = describe_forward(config, spec).layers
    assert list(describe_forward(found, after).layers) == [before[i] for i in kept]
    old, new = AutoConfig.for_model(**config), AutoConfig.for_model(**found)
    for key in ("layer_types", "no_rope_layers"):
        entries = getattr(old, key, None)
        assert getattr(new, key, None) == (entries and [entries[i] for i in kept])


def test_numbers_of_blocks_move_with_them(sources: Any) -> None:
    """max_window_layers counts those that stay; lists that follow no rule are written out, and
    what no longer holds is left out, with a note."""
    spec = sources("qwen3").spec
    config = {**sources("qwen3").config, "num_hidden_layers": 12, **WINDOWED}
    config |= {"layer_types": TYPES, "max_window_layers": 5}
    spec = spec_of("qwen3", config, spec)
    found = resized(config, spec, Shape(layers=(0, 1, 7, 8))).config
    assert found["max_window_layers"] == 2
    assert found["layer_types"] == [TYPES[i] for i in (0, 1, 7, 8)]
    gemma = sources("gemma3_text")
    config = {k: v for k, v in gemma.config.items() if k != "layer_types"}
    config |= {"num_hidden_layers": 12, "sliding_window_pattern": 6}
    config.pop("_sliding_window_pattern", None)
    spec = spec_of("gemma3_text", config, gemma.spec)
    result = resized(config, spec, Shape(layers=(4, 5, 6)))
    assert result.config["layer_types"] == [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ]
    assert "sliding_window_pattern" not in result.config
    assert result.notes == (
        "sliding_window_pattern is left out, as layer_types no longer repeats so",
        "layer_types is written out, as the blocks that stay no longer follow a rule",
    )
    result = resized(config, spec, Shape(layers=(0, 1, 2, 3, 4, 5)))
    assert result.config == {**config, "num_hidden_layers": 6}
    assert result.notes == ()


def test_a_mixture_with_plain_blocks(tiny: Any, tmp_path: Path) -> None:
    """Every second block has experts; the width of one is not that of a plain block."""
    options = {"num_hidden_layers": 4, "decoder_sparse_step": 2}
    source = read(tiny("qwen3_moe", dtype="fp32", **options))
    shape, zeroed = Shape(ffn=20, layers=(1, 2)), clone(source)
    for linear in writers(source.spec, [0, 3]):
        zeroed[linear.tensor].zero_()
    for linear in source.spec.blocks[1].linears:
        if linear.role == "down":
            zeroed[linear.tensor][:, 20:] = 0
    plain, experts = Kept(), Kept(ffn=(torch.arange(20),) * 4)
    result = resized(source.config, source.spec, shape)
    assert result.config["mlp_only_layers"] == [1]
    assert result.config["intermediate_size"] == 96
    assert result.notes == (
        "decoder_sparse_step 2 became mlp_only_layers [1], which say the same of the blocks",
    )
    write(tmp_path / "cut", *cut_model(source, shape, lambda i: experts if i == 1 else plain))
    wanted = logits_of(source, zeroed, tmp_path / "zeroed")
    torch.testing.assert_close(logits(load(tmp_path / "cut")), wanted, atol=1e-5, rtol=1e-5)


def changes(source: Source, shape: Shape, **config: Any) -> dict[str, Any]:
    """What becomes other than it was in a config with some keys of its own; None for one less."""
    before = {k: v for k, v in {**source.config, **config}.items() if v is not ...}
    after = resized(before, source.spec, shape).config
    keys = before.keys() | after.keys()
    return {k: after.get(k) for k in keys if after.get(k) != before.get(k)}


def test_a_size_goes_under_the_key_that_had_it(sources: Any) -> None:
    gpt2, opt, moe = sources("gpt2"), sources("opt"), sources("qwen3_moe")
    assert changes(gpt2, Shape(ffn=80)) == {"n_inner": 80}
    assert changes(gpt2, Shape(hidden=48, heads=3)) == {"n_embd": 48, "n_head": 3}
    assert changes(opt, Shape(ffn=80)) == {"ffn_dim": 80}
    smaller = {"hidden_size": 48, "num_attention_heads": 3, "word_embed_proj_dim": 48}
    assert changes(opt, Shape(hidden=48, heads=3)) == smaller
    assert changes(moe, Shape(ffn=16)) == {"moe_intermediate_size": 16}
    assert changes(moe, Shape(experts=2)) == {"num_local_experts": 2}
    named = changes(moe, Shape(experts=2), num_local_experts=..., num_experts=4)
    assert named == {"num_experts": 2}
    assert changes(sources("mixtral"), Shape(ffn=16)) == {"intermediate_size": 16}


def test_what_followed_from_another_size_is_written_out(sources: Any) -> None:
    llama, gemma = sources("llama"), sources("gemma2")
    smaller = {"num_attention_heads": 2, "head_dim": 16}
    assert changes(llama, Shape(heads=2), head_dim=...) == smaller
    assert changes(llama, Shape(hidden=48), head_dim=...) == {"hidden_size": 48, "head_dim": 16}
    assert changes(llama, Shape(ffn=80), head_dim=...) == {"intermediate_size": 80}
    assert changes(gemma, Shape(hidden=48), head_dim=16) == {"hidden_size": 48}
    gpt2 = sources("gpt2")
    wide = {k: v for k, v in gpt2.config.items() if k != "n_inner"}
    four = replace(gpt2, config=wide, spec=spec_of("gpt2", wide, gpt2.spec))
    smaller = {"n_embd": 48, "n_head": 3, "n_inner": 256}
    assert changes(four, Shape(hidden=48, heads=3)) == smaller
    assert changes(four, Shape(hidden=48, heads=3), n_inner=None) == smaller
    own = {"num_attention_heads": 4, "num_key_value_heads": 4}
    alone = spec_of("qwen2", {**sources("qwen2").config, **own}, sources("qwen2").spec)
    source = replace(sources("qwen2"), spec=alone)
    found = changes(source, Shape(kv_heads=3), num_key_value_heads=..., head_dim=...)
    assert found == {"num_attention_heads": 3, "head_dim": 16}


def test_a_nested_config_keeps_what_is_around_it(sources: Any) -> None:
    source = sources("gemma3_text")
    config = {"model_type": "gemma3", "text_config": source.config, "vision_config": {"a": 1}}
    tensors = shapes(source.state) | {"vision_tower.encoder.layers.0.mlp.fc1.weight": (9, 64)}
    spec = describe(config, tensors)
    found = resized(config, spec, Shape(ffn=80, layers=(0, 1))).config
    text = resized(source.config, source.spec, Shape(ffn=80, layers=(0, 1))).config
    assert found == {**config, "text_config": text}
    stored = [(name, "F32", shape) for name, shape in tensors.items()]
    after = entries(spec, stored, Shape(ffn=80, layers=(0, 1)))
    assert describe(found, {name: shape for name, _, shape in after}).intermediate == 80
    assert ("vision_tower.encoder.layers.0.mlp.fc1.weight", "F32", (9, 64)) in after
    with pytest.raises(CheckpointError) as refusal:
        entries(spec, stored, Shape(hidden=48))
    assert str(refusal.value) == (
        "tensor vision_tower.encoder.layers.0.mlp.fc1.weight lies outside of the decoder and has"
        " shape [9, 64], as wide as the residual (64); hidden cannot be cut in this model, leave it"
        " out"
    )


def test_buffers_of_old_checkpoints_stay_as_they_are(sources: Any) -> None:
    """gpt2's mask is as large as its context, which may be as much as its hidden."""
    source = sources("gpt2")
    mask = (1, 1, 64, 64)
    tensors = shapes(source.state) | {f"transformer.h.{i}.attn.bias": mask for i in range(3)}
    spec = describe(source.config, tensors)
    shape = Shape(hidden=48, heads=3, layers=(0, 2))
    stored = [(name, "F32", dims) for name, dims in tensors.items()]
    masks = [entry for entry in entries(spec, stored, shape) if entry[0].endswith(".attn.bias")]
    assert masks == [(f"transformer.h.{i}.attn.bias", "F32", mask) for i in range(2)]


def test_a_tensor_that_nobody_knows_keeps_a_block_from_being_narrowed(sources: Any) -> None:
    source = sources("llama")
    tensors = shapes(source.state) | {"model.layers.1.mlp.scale": (96,)}
    spec = describe(source.config, tensors)
    stored = [(name, "F32", dims) for name, dims in tensors.items()]
    with pytest.raises(CheckpointError) as refusal:
        entries(spec, stored, Shape(ffn=80))
    assert str(refusal.value) == (
        "tensor model.layers.1.mlp.scale is in no row of llama's table, so nobody knows what it"
        " becomes at other widths; only blocks can be taken out of this model"
    )
    after = entries(spec, stored, Shape(hidden=64, ffn=96, heads=4, layers=(1, 2)))
    assert ("model.layers.0.mlp.scale", "F32", (96,)) in after


REFUSED: list[tuple[str, dict[str, Any], Shape, str]] = [
    ("llama", {}, Shape(ffn=0), "ffn is 0; it must be 1 to 96, the source's"),
    ("qwen3_moe", {}, Shape(ffn=33), "ffn is 33; it must be 1 to 32, the source's"),
    ("llama", {}, Shape(hidden=65), "hidden is 65; it must be 1 to 64, the source's"),
    ("llama", {}, Shape(kv_heads=3), "kv_heads is 3; it must be 1 to 2, the source's"),
    (
        "llama",
        {},
        Shape(heads=3),
        (
            "heads is 3; with kv_heads 2 it must be 2 or 4, as each group keeps equally many"
            " query heads of its 2"
        ),
    ),
    (
        "gpt_neox",
        {},
        Shape(heads=4, kv_heads=2),
        (
            "heads is 4; with kv_heads 2 it must be 2, as each group keeps equally many"
            " query heads of its 1"
        ),
    ),
    (
        "mixtral",
        {},
        Shape(experts=1),
        "experts is 1; it must be 2 to 4, the source's, as each token takes 2",
    ),
    (
        "llama",
        {},
        Shape(experts=2),
        "experts is 2; the model is no mixture of experts, so leave it out",
    ),
    ("llama", {}, Shape(layers=()), "layers is empty; 1 to 3 of the source's blocks can stay"),
    ("llama", {}, Shape(layers=(0, 3)), "layers has 3; the source's blocks are 0 to 2"),
    (
        "llama",
        {"layer_types": ["full_attention"]},
        Shape(layers=(0, 2)),
        (
            "config.json: layer_types is ['full_attention']; it must be a list of 3 entries, one a"
            " layer"
        ),
    ),
    (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        Shape(layers=(0, 2)),
        (
            "block 2 would become block 1, and its attention is scaled by its place"
            " (scale_attn_by_inverse_layer_idx); only the last blocks can go"
        ),
    ),
    (
        "llama",
        {"per_layer_config": {"1": {"intermediate_size": 8}}},
        Shape(ffn=80),
        (
            "config.json has per_layer_config, so its blocks have sizes of their own; sizes can be"
            " changed of models whose blocks are alike"
        ),
    ),
]


@pytest.mark.parametrize(("family", "config", "shape", "line"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(
    family: str, config: dict[str, Any], shape: Shape, line: str, refusal: Any
) -> None:
    assert refusal(family, config, shape) == line


def test_the_last_blocks_can_go_where_places_count(sources: Any) -> None:
    source = sources("gpt2")
    config = {**source.config, "scale_attn_by_inverse_layer_idx": True}
    found = resized(config, source.spec, Shape(layers=(0, 1))).config
    assert found == {**config, "n_layer": 2}


def test_a_decoder_in_no_table_is_refused(sources: Any) -> None:
    source = sources("llama")
    spec = replace(source.spec, family="generic", model_type="granite")
    with pytest.raises(CheckpointError, match=r"^model type 'granite' is in no table of arch"):
        resized(source.config, spec, Shape(ffn=80))


def test_a_list_that_may_be_of_the_blocks_is_noted(sources: Any) -> None:
    source = sources("llama")
    config = {**source.config, "skips": [1, 2, 3], "eos_token_id": [0, 1, 2]}
    assert resized(config, source.spec, Shape(layers=(0, 2))).notes == (
        "config.json: skips has 3 entries, as many as there were blocks; it stays as it is",
    )


def test_heads_of_latent_attention_stay(tiny: Any) -> None:
    source = read(tiny("deepseek_v3"))
    assert resized(source.config, source.spec, Shape(ffn=80)).config["intermediate_size"] == 80
    for shape in (Shape(heads=2), Shape(kv_heads=2), Shape(kv_heads=2, pooled=True)):
        with pytest.raises(CheckpointError) as refusal:
            resized(source.config, source.spec, shape)
        assert str(refusal.value) == (
            "deepseek_v3 has latent attention, whose keys and values are made of one latent; its"
            " heads stay, cut ffn or layers"
        )
