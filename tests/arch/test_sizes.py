"""Sizes of each block: one number for all, or a list where a family's config may have one."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from compress.arch.describe import describe
from compress.arch.sizes import BLOCK_KEYS, BlockSizes, SizeRule, read_sizes
from compress.arch.spec import DecoderSpec
from compress.errors import CheckpointError
from helpers.engine import hybrids


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with hybrids.known():
        yield


def described(what: str, **changes: Any) -> DecoderSpec:
    """As the shapes on disk and a config with other values are read."""
    config = hybrids.config_of(what)
    return describe({**config, **changes}, hybrids.shapes_of(config))


@pytest.mark.parametrize("what", hybrids.CONFIGS)
def test_every_block_has_the_sizes_of_its_own(what: str) -> None:
    spec, config = described(what), hybrids.config_of(what)
    for block in spec.blocks:
        at, sizes = hybrids.Sizes(config, block.index), block.sizes
        found = (sizes.heads, sizes.kv_heads, sizes.key_width, sizes.value_width)
        assert found == at.attention
        heads, kv_heads, keys, values = at.attention
        assert sizes.cache().parts == ((kv_heads, keys), (kv_heads, values))
        assert {x.expert for x in block.linears} - {None} == set(
            range(at("num_experts") if at.sparse else 0)
        )
        (attended,) = (x for x in block.folds if x.writer.endswith("v_proj"))
        assert (attended.rows, attended.repeat) == ((0, kv_heads * values), heads // kv_heads)
        assert attended.head_dim == (values if heads > kv_heads else 0)
    widest = {
        name: max(getattr(x.sizes, name) for x in spec.blocks) for name in ("heads", "experts")
    }
    assert {name: getattr(spec, name) for name in widest} == widest


@pytest.mark.parametrize(
    ("what", "changes", "message"),
    [
        (
            "two kinds",
            {"num_key_value_heads": [4, 2, 2, 2]},
            (
                "tensor model.layers.2.self_attn.k_proj.weight has shape [64, 64], config.json asks"
                " for [32, 64]"
            ),
        ),
        (
            "two kinds",
            {"intermediate_size": 96},
            (
                "tensor model.layers.1.mlp.gate_proj.weight has shape [64, 64], config.json asks"
                " for [96, 64]"
            ),
        ),
        (
            "narrow values",
            {"v_head_dim": 24},
            (
                "tensor model.layers.0.self_attn.v_proj.weight has shape [16, 64], config.json asks"
                " for [48, 64]"
            ),
        ),
        (
            "two kinds",
            {"head_dim": [16, 24]},
            (
                "config.json: head_dim has 2 entries; it must have 4, one for each layer, or be one"
                " number"
            ),
        ),
        (
            "two kinds",
            {"head_dim": [16, 24, "16", 24]},
            "config.json: head_dim[2] is '16'; it must be a whole number",
        ),
        (
            "wide values and narrow ones, experts",
            {"num_experts_per_tok": 5},
            "config.json: num_experts_per_tok is 5; it must be 1 to 4, the number of experts",
        ),
    ],
)
def test_shapes_and_config_must_agree(what: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        described(what, **changes)


def test_a_family_without_lists_has_none() -> None:
    with pytest.raises(
        CheckpointError, match=r"num_attention_heads is \[8, 4, 8, 4\]; it must be a whole"
    ):
        described("two kinds", model_type="qwen3")


def test_values_are_as_wide_as_keys_where_the_family_does_not_say_more() -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config |= {"vocab_size": 9, "v_head_dim": 8}
    assert {x.value_width for x in read_sizes(config, SizeRule({})).blocks} == {16}
    assert {x.value_width for x in read_sizes(config, SizeRule({}, value_width=True)).blocks} == {8}


def test_a_decoder_in_no_table_may_have_lists() -> None:
    """gemma3n's config.json has one of FFN widths; its layers are found by names and shapes."""
    spec = described("two kinds", model_type="neverheardof")
    assert spec.family == "generic"
    assert [x.sizes.intermediate for x in spec.blocks] == [96, 64, 32, 96]
    assert spec.kv_bytes_per_token(2) == 2 * sum(x.sizes.cache().numbers for x in spec.blocks)


def test_sizes_of_blocks_are_those_that_config_keys_are_known_for() -> None:
    names = {*BLOCK_KEYS, "value_width", "dense", "latent"}
    assert names == set(BlockSizes.__dataclass_fields__)
