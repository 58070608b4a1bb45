"""How decoders compute, by config.json; what the tables do not know is refused by its key."""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from compress.arch.families.table import FAMILIES
from compress.arch.forward.forward import ForwardSpec, Positions, describe_forward
from compress.arch.forward.kinds import Latent
from compress.arch.forward.rope import KINDS, Rope
from compress.arch.forward.table import FORWARDS
from compress.arch.layer_cache import HeadShape, LayerCache
from compress.arch.sizes import BlockSizes, LatentSizes
from compress.arch.spec import BlockSpec, DecoderSpec
from compress.errors import CheckpointError

LAYERS = 6


def spec_of(table: str, /, **changes: Any) -> DecoderSpec:
    """changes: fields of DecoderSpec, or of the sizes of all its blocks."""
    experts = 8 if FORWARDS[table].experts_per_token else 0
    sizes = BlockSizes(4, 2, 16, 16, 96, 0, experts, dense=not experts)
    own = {field.name: changes.pop(field.name) for field in fields(sizes) if field.name in changes}
    sizes = replace(sizes, **own)
    facts = {
        "family": table,
        "model_type": table,
        "text_config": (),
        "hidden": 64,
        "vocab": 100,
        "context": 128,
        "experts_per_token": 0,
        "tied": True,
        "embedding": "model.wte.weight",
        "embedding_shape": (100, 64),
        "final_norm": "model.norm.weight",
        "head": None,
        "head_shape": None,
        "outside": (),
        "blocks": tuple(
            BlockSpec(i, f"model.layers.{i}", (), (), sizes=sizes) for i in range(LAYERS)
        ),
        "copied": (),
    }
    return DecoderSpec(**(facts | changes))


def forward(family: str, config: Mapping[str, Any] | None = None, **changes: Any) -> ForwardSpec:
    return describe_forward(config or {}, spec_of(family, **changes))


def windows(found: ForwardSpec) -> list[int | None]:
    return [layer.window for layer in found.layers]


def rotation(found: ForwardSpec, layer: int = 0) -> Rope:
    rope = found.layers[layer].rope
    assert rope is not None
    return rope


def test_every_family_of_the_tables_has_a_forward() -> None:
    assert FORWARDS.keys() == FAMILIES.keys()
    for family in FORWARDS:
        found = forward(family)
        assert len(found.layers) == LAYERS
        assert found.eps > 0
        # Plans count what a token leaves by the sizes, pools by the kinds.
        kept = [block.sizes.cache() for block in spec_of(family).blocks]
        assert [layer.cache() for layer in found.layers] == kept


def test_what_is_in_no_table_is_refused_with_what_is() -> None:
    message = r"model type 'cohere' is in no table of forwards; it runs in transformers only, known"
    with pytest.raises(CheckpointError, match=message):
        describe_forward({}, spec_of("llama", family="generic", model_type="cohere"))


@pytest.mark.parametrize(
    ("family", "config", "expected"),
    [
        ("llama", {"sliding_window": 4}, [None] * 6),
        ("mistral", {}, [4096] * 6),
        ("mistral", {"sliding_window": None}, [None] * 6),
        ("ministral", {}, [4096] * 6),
        ("ministral", {"sliding_window": None}, [None] * 6),
        (
            "ministral",
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 3},
            [8, None] * 3,
        ),
        ("cwm", {}, [None, 8192, 8192, 8192, None, 8192]),
        ("mixtral", {}, [None] * 6),
        ("phi3", {"sliding_window": 9}, [9] * 6),
        ("qwen2", {"sliding_window": 8}, [None] * 6),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 4}, [None] * 4 + [4096] * 2),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, [None] * 6),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, [8] * 6),
        ("qwen3_moe", {"sliding_window": 8}, [None] * 6),
        ("gemma2", {}, [4096, None] * 3),
        ("gemma2", {"layer_types": ["full_attention"] * 6}, [None] * 6),
        ("gemma3_text", {"sliding_window": 5}, [5, 5, 5, 5, 5, None]),
        ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 3}, [5, 5, None] * 2),
        ("smollm3", {}, [None] * 6),
        (
            "smollm3",
            {"use_sliding_window": True, "sliding_window": 5},
            [None, None, None, 5, None, None],
        ),
    ],
)
def test_windows(family: str, config: dict[str, Any], expected: list[int | None]) -> None:
    found = forward(family, config)
    assert windows(found) == expected
    assert found.windows == tuple(dict.fromkeys(expected))
    assert [found.windows[found.group(i)] for i in range(LAYERS)] == expected


def test_rotations_of_some_layers_and_of_two_kinds() -> None:
    found = forward("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1, 0]})
    assert [layer.rope is not None for layer in found.layers] == [True, True, False] * 2
    assert rotation(found).theta == 2_000_000
    found = forward("smollm3", {"no_rope_layer_interval": 2})
    assert [layer.rope is not None for layer in found.layers] == [True, False] * 3
    found = forward("gemma3_text", {})
    assert [rotation(found, i).theta for i in range(6)] == [1e4] * 5 + [1e6]
    older = {"rope_theta": 5e5, "rope_local_base_freq": 2e4}
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    found = forward("gemma3_text", older | scaling)
    assert (rotation(found, 0).kind, rotation(found, 0).theta) == ("default", 2e4)
    assert rotation(found, 5) == Rope(16, 5e5, "linear", {"factor": 8.0})
    assert forward("gpt2").layers[0].rope is None


@pytest.mark.parametrize(
    ("family", "config", "expected"),
    [
        ("llama", {}, Rope(16, 1e4, "default", {})),
        ("mixtral", {"rope_theta": 5e5}, Rope(16, 5e5, "default", {})),
        ("llama", {"rope_parameters": {"rope_theta": 5e5}}, Rope(16, 5e5, "default", {})),
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            Rope(16, 5e5, "linear", {"factor": 2.0}),
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            Rope(16, 1e4, "dynamic", {"factor": 2.0, "max_position_embeddings": 128}),
        ),
        ("gpt_neox", {}, Rope(4, 1e4, "default", {})),
        ("gpt_neox", {"rotary_pct": 1.0, "rotary_emb_base": 5e5}, Rope(16, 5e5, "default", {})),
        ("phi3", {"partial_rotary_factor": 0.75}, Rope(12, 1e4, "default", {})),
    ],
)
def test_one_rotation(family: str, config: dict[str, Any], expected: Rope) -> None:
    assert rotation(forward(family, config)) == expected


def test_cwm_stretches_its_rotation_where_config_json_has_none() -> None:
    from transformers import CwmConfig

    assumed = CwmConfig().rope_parameters
    assert rotation(forward("cwm")) == rotation(forward("cwm", {"rope_parameters": assumed}))
    assert rotation(forward("cwm")).kind == "llama3"
    plain = {"rope_parameters": {"rope_type": "default"}}
    assert rotation(forward("cwm", plain)) == Rope(16, 1e6, "default", {})


def test_a_rotation_knows_beyond_which_length_it_changes() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    # su: what phi3 called longrope; a length beside the parameters counts more than one in them.
    given = {"type": "su", **factors, "original_max_position_embeddings": 32}
    config = {"rope_scaling": given, "original_max_position_embeddings": 64}
    rope = rotation(forward("phi3", config))
    assert (rope.kind, rope.length) == ("longrope", 64)
    assert rope.parameters["attention_factor"] == pytest.approx((1 + 1 / 6) ** 0.5)
    given = {"rope_type": "longrope", **factors, "original_max_position_embeddings": 32}
    assert rotation(forward("llama", {"rope_parameters": given})).length == 32
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    assert rotation(forward("llama", dynamic)).length == 128
    assert rotation(forward("llama")).length is None


def test_scales_caps_and_switches() -> None:
    gemma = forward("gemma2", {"query_pre_attn_scalar": 64, "attn_logit_softcapping": None})
    assert gemma.layers[0].scale == 1 / 8
    assert (gemma.layers[0].softcap, gemma.final_softcap) == (None, 30.0)
    assert (gemma.embedding_scale, gemma.norm_offset, gemma.norm_late) == (8.0, 1.0, True)
    assert forward("gemma2").layers[0].softcap == 50.0
    gpt2 = forward("gpt2", {"scale_attn_by_inverse_layer_idx": True})
    assert [layer.scale for layer in gpt2.layers[:2]] == [0.25, 0.125]
    assert forward("gpt2", {"scale_attn_weights": False}).layers[0].scale == 1
    assert gpt2.positions == Positions("model.wpe.weight", 0)
    assert forward("opt").positions == Positions("model.embed_positions.weight", 2)
    assert forward("gpt_neox").parallel
    assert not forward("gpt_neox", {"use_parallel_residual": False}).parallel
    mixture = forward("qwen3_moe", {"num_experts_per_tok": 3})
    assert (mixture.experts_per_token, mixture.norm_topk) == (3, False)
    assert forward("mixtral").norm_topk
    assert forward("qwen3_moe", {"num_experts_per_tok": 3}, experts=0).experts_per_token == 0


LATENT = LatentSizes(rank=32, rotated=8)


def test_latent_attention() -> None:
    spec = spec_of("deepseek_v3", kv_heads=4, key_width=24, value_width=12, latent=LATENT)
    found = describe_forward({"rms_norm_eps": 1e-3}, spec)
    kind = found.layers[0]
    rope = Rope(8, 1e4, "default", {})
    assert kind == Latent(4, 32, 8, 16, 12, None, rope, True, 24**-0.5, 1e-6)
    assert (found.eps, found.kinds, kind.products) == (1e-3, (0,) * LAYERS, 4 * (32 + 8 + 32))
    assert (
        kind.cache() == LayerCache((HeadShape(1, 40),), values=32) == spec.blocks[0].sizes.cache()
    )
    assert spec.kv_bytes_per_token(2) == LAYERS * (32 + 8) * 2
    halves = describe_forward({"rope_interleave": False}, spec).layers[0]
    assert isinstance(halves, Latent)
    assert not halves.interleaved
    with pytest.raises(CheckpointError, match="layer 0 has latent attention, which is rounded"):
        found.grouped(0)


def test_heads_that_share_a_latent_are_all_alike() -> None:
    message = "num_key_value_heads is 2; it must be 4, all heads"
    with pytest.raises(CheckpointError, match=f"^config.json: {message}$"):
        forward("deepseek_v3", key_width=24, latent=LATENT)


def test_factors_that_are_the_same_for_all_lengths_leave_texts_their_keys() -> None:
    given = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    factors = [1.0, 1.0, 10.0, 2.5, 1.0, 1.0, 1.0, 1.0]
    config = {**given, "short_factor": factors, "long_factor": factors}
    found = forward("llama", {"rope_parameters": config})
    assert rotation(found).length is None
    assert found.variant(1000) == 0
    other = {**config, "long_factor": [*factors[:-1], 3.0]}
    assert forward("llama", {"rope_parameters": other}).variant(1000) == 1


def test_the_decoders_own_config_counts() -> None:
    config = {"rms_norm_eps": 1.0, "text_config": {"rms_norm_eps": 1e-4}}
    assert forward("gemma3_text", config, text_config=("text_config",)).eps == 1e-4


def roped(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": parameters}


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; it must be a number above"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a number above 0"),
        ("llama", {"hidden_act": "xielu"}, "hidden_act is 'xielu'; known are silu"),
        ("llama", roped(rope_type="proportional"), "rope_parameters.rope_type is 'proportional'"),
        ("llama", {"rope_scaling": {"type": "mrope"}}, "rope_scaling.rope_type is 'mrope'; known"),
        ("llama", roped(rope_type=["yarn"]), "rope_parameters.rope_type is ['yarn']; known are"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters is [1]; it must be one mapping"),
        ("llama", roped(full_attention={}), "it must be one mapping of names to numbers"),
        ("llama", roped(rope_type="linear"), "rope_parameters.factor is None; it must be a number"),
        ("llama", roped(rope_type="linear", factor=True), "rope_parameters.factor is True"),
        ("llama", roped(partial_rotary_factor=0.5), "it must be 1, as this family rotates whole"),
        ("phi3", roped(partial_rotary_factor=1.5), "partial_rotary_factor is 1.5; it must be at"),
        ("phi3", roped(partial_rotary_factor=0.01), "a head has 16 numbers"),
        ("phi3", roped(rope_type="linear"), "rope_type is 'linear'; known are default, longrope"),
        (
            "phi3",
            roped(rope_type="longrope", short_factor=[1.0]),
            "rope_parameters.short_factor is [1.0]; it must be a list of 8 numbers",
        ),
        (
            "llama",
            roped(rope_type="llama3", factor=8, low_freq_factor=2, high_freq_factor=2),
            "high_freq_factor is 2.0; it must differ from low_freq_factor",
        ),
        (
            "llama",
            roped(rope_type="yarn", factor=2, original_max_position_embeddings="4k"),
            "rope_parameters.original_max_position_embeddings is '4k'; it must be a whole number",
        ),
        ("llama", roped(rope_type="yarn", factor=2, truncate=1), "truncate is 1; it must be true"),
        ("gemma3_text", roped(rope_type="default"), "it must have sliding_attention and full_att"),
        (
            "gemma2",
            {"layer_types": ["full_attention"]},
            "it must be a list of 6 names, one a layer",
        ),
        (
            "gemma2",
            {"layer_types": ["full_attention"] * 5 + ["chunked_attention"]},
            "layer_types[5] is 'chunked_attention'; layers of sliding_attention and full_attention",
        ),
        ("gemma2", {"sliding_window": None}, "sliding_window is None; layer_types has sliding_att"),
        ("gemma2", {"sliding_window": 0}, "sliding_window is 0; it must be a whole number, 1 or"),
        ("gemma2", {"final_logit_softcapping": -1}, "final_logit_softcapping is -1"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (
            "gpt2",
            {"add_cross_attention": True},
            "add_cross_attention is True; a decoder that needs",
        ),
        (
            "gpt_neox",
            {"use_parallel_residual": "yes"},
            "use_parallel_residual is 'yes'; it must be",
        ),
        (
            "smollm3",
            {"no_rope_layers": [1]},
            "no_rope_layers is [1]; it must be a list with 0 or 1",
        ),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1; it must be true or false"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; there are 8 experts"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0; it must be a whole"),
    ],
)
def test_values_that_the_tables_do_not_know(
    family: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        forward(family, config)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


def test_a_context_that_a_rotation_needs() -> None:
    with pytest.raises(CheckpointError, match="max_position_embeddings is None; it must be"):
        forward("llama", roped(rope_type="dynamic", factor=2.0), context=0)
    tiny = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(CheckpointError, match="it needs more than one pair a head"):
        forward("llama", {"rope_parameters": tiny}, key_width=2)


def test_heads_that_do_not_share_evenly() -> None:
    with pytest.raises(CheckpointError, match="num_key_value_heads is 3; it must divide the 4"):
        forward("llama", kv_heads=3)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from compress.arch.forward.forward import describe_forward;"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\[\]\s*", out.stdout)


def test_kinds_are_those_that_the_runtime_computes() -> None:
    from compress.arch.forward.activations import ACTIVATIONS
    from compress.runtime.decoder.activations import FUNCTIONS
    from compress.runtime.decoder.rope import FREQUENCIES

    assert FREQUENCIES.keys() == KINDS.keys()
    assert FUNCTIONS.keys() == set(ACTIVATIONS)


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """A kind of layer that nothing computes yet, with a cache of one part."""

    rank: int
    window: int | None = None
    rope: Rope | None = None

    @property
    def products(self) -> int:
        return 2 * self.rank

    def cache(self) -> LayerCache:
        return LayerCache((HeadShape(1, self.rank),))


def test_layers_that_compute_alike_are_one_kind() -> None:
    found = forward("gemma2", {"sliding_window": 5})
    assert (len(found.rows), found.kinds) == (2, (0, 1, 0, 1, 0, 1))
    assert found.layers == (*found.rows, *found.rows, *found.rows)
    assert len(forward("llama").rows) == 1
    by_layer = forward("gpt2", {"scale_attn_by_inverse_layer_idx": True})
    assert by_layer.kinds == tuple(range(LAYERS))


def test_another_kind_of_layer_stands_beside_and_is_refused_by_its_number() -> None:
    found = forward("llama")
    mixed = replace(found, rows=(*found.rows, Unbuilt(40)), kinds=(0, 0, 0, 1, 0, 0))
    assert mixed.windows == (None,)
    assert mixed.ropes == found.ropes
    assert mixed.grouped(2) == found.rows[0]
    message = "layer 3 is of the kind Unbuilt; layers of the kind Grouped are computed here"
    with pytest.raises(CheckpointError, match=f"^{message}$"):
        mixed.grouped(3)
