"""Descriptions come from names and shapes; every mismatch is refused in one line."""

import re
import subprocess
import sys
from typing import Any

import pytest

from compress.arch.describe import describe
from compress.arch.sizes import LatentSizes
from compress.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def llama_block(prefix: str) -> Shapes:
    shapes = {
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
    }
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def llama(prefix: str = "model", layers: int = 2, head: str | None = "lm_head.weight") -> Shapes:
    dot = prefix + "." if prefix else ""
    shapes: Shapes = {f"{dot}embed_tokens.weight": (100, 32), f"{dot}norm.weight": (32,)}
    for index in range(layers):
        shapes |= llama_block(f"{dot}layers.{index}")
    return shapes | ({head: (100, 32)} if head else {})


def gpt2(prefix: str) -> tuple[dict[str, Any], Shapes]:
    config = {
        "model_type": "gpt2",
        "n_embd": 8,
        "n_head": 2,
        "n_layer": 1,
        "vocab_size": 20,
        "n_positions": 16,
        "n_ctx": 16,
    }
    weights = {
        "wte.weight": (20, 8),
        "wpe.weight": (16, 8),
        "ln_f.weight": (8,),
        "ln_f.bias": (8,),
        "h.0.ln_1.weight": (8,),
        "h.0.ln_1.bias": (8,),
        "h.0.ln_2.weight": (8,),
        "h.0.ln_2.bias": (8,),
        "h.0.attn.c_attn.weight": (8, 24),
        "h.0.attn.c_attn.bias": (24,),
        "h.0.attn.c_proj.weight": (8, 8),
        "h.0.attn.c_proj.bias": (8,),
        "h.0.mlp.c_fc.weight": (8, 32),
        "h.0.mlp.c_fc.bias": (32,),
        "h.0.mlp.c_proj.weight": (32, 8),
        "h.0.mlp.c_proj.bias": (8,),
        "h.0.attn.bias": (1, 1, 64, 64),
    }
    return config, {prefix + name: shape for name, shape in weights.items()}


def test_llama_linears_and_their_inputs() -> None:
    spec = describe(CONFIG, llama())
    block = spec.blocks[1]
    assert [(i.role, i.shape) for i in block.linears] == [
        ("q", (32, 32)),
        ("k", (16, 32)),
        ("v", (16, 32)),
        ("o", (32, 32)),
        ("gate", (48, 32)),
        ("up", (48, 32)),
        ("down", (32, 48)),
    ]
    inputs = ["attn_in"] * 3 + ["attn_out"] + ["mlp_in"] * 2 + ["mlp_mid"]
    assert [linear.shared_input for linear in block.linears] == inputs
    assert block.linears[0].tensor == "model.layers.1.self_attn.q_proj.weight"
    assert (spec.head_dim, spec.kv_heads, spec.tied, spec.copied) == (8, 2, False, ())


LATENT = {
    **CONFIG,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "head_dim": 2,  # what its class writes there is qk_rope_head_dim
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}


def latent(query_rank: int = 0) -> Shapes:
    queries = {"q_proj": (32, 32)}
    if query_rank:
        queries = {"q_a_proj": (query_rank, 32), "q_b_proj": (32, query_rank)}
    attention = {
        **queries,
        **({"q_a_layernorm": (query_rank,)} if query_rank else {}),
        "kv_a_proj_with_mqa": (14, 32),
        "kv_a_layernorm": (12,),
        "kv_b_proj": (4 * 11, 12),
        "o_proj": (32, 20),
    }
    shapes = {name: shape for name, shape in llama().items() if "self_attn" not in name}
    for index in range(2):
        at = f"model.layers.{index}.self_attn"
        shapes |= {f"{at}.{name}.weight": shape for name, shape in attention.items()}
    return shapes


def test_linears_of_latent_attention_and_their_inputs() -> None:
    spec = describe(LATENT, latent())
    assert (spec.family, spec.experts, spec.experts_per_token) == ("deepseek_v3", 0, 0)
    assert [(x.role, x.shape, x.shared_input) for x in spec.blocks[1].linears][:4] == [
        ("q", (32, 32), "attn_in"),
        ("kv_a", (14, 32), "attn_in"),
        ("kv_b", (44, 12), "kv_latent"),
        ("o", (32, 20), "attn_out"),
    ]
    assert spec.blocks[0].sizes.latent == LatentSizes(rank=12, rotated=2)
    assert (spec.head_dim, spec.blocks[0].sizes.value_width, spec.copied) == (8, 5, ())
    assert spec.kv_bytes_per_token(2) == 2 * (12 + 2) * 2
    made = describe({**LATENT, "q_lora_rank": 10}, latent(10))
    assert [(x.role, x.shape, x.shared_input) for x in made.blocks[1].linears][:3] == [
        ("q_a", (10, 32), "attn_in"),
        ("q_b", (32, 10), "query_latent"),
        ("kv_a", (14, 32), "attn_in"),
    ]
    assert made.blocks[0].sizes.latent == LatentSizes(rank=12, rotated=2, query_rank=10)


def test_biases_of_latent_attention_are_asked_for_by_the_config() -> None:
    biased = {**LATENT, "attention_bias": True}
    with pytest.raises(CheckpointError, match=r"kv_a_proj_with_mqa.bias is missing"):
        describe(biased, latent())
    at = "model.layers.{}.self_attn.{}.bias"
    names = {"kv_a_proj_with_mqa": (14,), "o_proj": (32,)}
    biases = {at.format(i, name): shape for i in range(2) for name, shape in names.items()}
    assert describe(biased, latent() | biases).blocks[0].unrecognised == ()


@pytest.mark.parametrize("first", [1, None])
def test_a_mixture_with_latent_attention_is_read_by_names(first: int | None) -> None:
    spec = describe({**LATENT, "first_k_dense_replace": first}, latent())
    assert spec.family == "generic"
    assert spec.experts == 8
    assert spec.blocks[0].sizes.latent is None
    assert {x.role for x in spec.blocks[0].linears} == {"linear"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0; a latent has 1 number or more"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim is 3; numbers are rotated in twos, so it must"),
        ({"q_lora_rank": 2.5}, "q_lora_rank is 2.5; it must be a whole number"),
        ({"kv_lora_rank": 16}, r"has shape \[14, 32\], config.json asks for \[18, 32\]"),
    ],
)
def test_sizes_of_latents_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        describe({**LATENT, **change}, latent())


@pytest.mark.parametrize("prefix", ["", "model", "model.language_model", "language_model.model"])
def test_the_decoder_is_found_under_any_prefix(prefix: str) -> None:
    nested = prefix.count(".") > 0
    config = {"model_type": "some_vlm", "text_config": CONFIG} if nested else CONFIG
    head = "language_model.lm_head.weight" if prefix.startswith("language") else "lm_head.weight"
    shapes = llama(prefix, head=head) | llama_block("vision_tower.layers.0")
    spec = describe(config, shapes)
    assert spec.head == head
    assert spec.text_config == (("text_config",) if nested else ())
    assert set(spec.copied) == set(llama_block("vision_tower.layers.0"))
    assert dict(spec.outside)[spec.embedding] == "model.embed_tokens.weight"


def test_multi_token_prediction_is_copied() -> None:
    extra = llama_block("model.layers.2") | llama("mtp", layers=1, head=None)
    spec = describe(CONFIG, llama() | extra)
    assert len(spec.blocks) == 2
    assert spec.copied == tuple(extra)


def test_tied_means_no_head_is_stored() -> None:
    tied = CONFIG | {"tie_word_embeddings": True}
    assert describe(tied, llama(head=None)).tied
    assert describe(tied, llama()).head == "lm_head.weight"
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing.*tie_word_embeddings"):
        describe(CONFIG, llama(head=None))


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_is_transposed_and_its_mask_buffers_are_not_parameters(prefix: str) -> None:
    config, shapes = gpt2(prefix)
    spec = describe(config, shapes)
    assert [(i.role, i.shape, i.transposed) for i in spec.blocks[0].linears] == [
        ("qkv", (24, 8), True),
        ("o", (8, 8), True),
        ("up", (32, 8), True),
        ("down", (8, 32), True),
    ]
    assert spec.tied
    assert spec.copied == (f"{prefix}h.0.attn.bias",)
    assert dict(spec.outside)[f"{prefix}wte.weight"] == "transformer.wte.weight"


def test_mixtral_experts_are_linears_of_their_own() -> None:
    shapes = llama(layers=1)
    shapes = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    moe = "model.layers.0.block_sparse_moe"
    shapes[f"{moe}.gate.weight"] = (3, 32)
    for e in range(3):
        shapes |= {
            f"{moe}.experts.{e}.w1.weight": (48, 32),
            f"{moe}.experts.{e}.w2.weight": (32, 48),
            f"{moe}.experts.{e}.w3.weight": (48, 32),
        }
    config = CONFIG | {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 3}
    linears = describe(config, shapes).blocks[0].linears
    assert [i.role for i in linears].count("router") == 1
    last = linears[-3:]
    assert [(i.role, i.expert, i.module) for i in last] == [
        ("gate", 2, "mlp.experts.2.gate"),
        ("up", 2, "mlp.experts.2.up"),
        ("down", 2, "mlp.experts.2.down"),
    ]
    assert last[0].shared_input == last[1].shared_input == "experts.2.in"
    del shapes[f"{moe}.experts.2.w3.weight"]
    with pytest.raises(CheckpointError, match=r"experts\.2\.w3\.weight is missing"):
        describe(config, shapes)


def gemma3_block(prefix: str, heads: int, head_dim: int) -> Shapes:
    wide = {"q_proj": (heads * head_dim, 32), "o_proj": (32, heads * head_dim)}
    kv = heads // 2 * head_dim
    shapes: Shapes = {f"self_attn.{name}": shape for name, shape in wide.items()}
    shapes |= {"self_attn.k_proj": (kv, 32), "self_attn.v_proj": (kv, 32)}
    shapes |= {f"self_attn.{x}_norm": (head_dim,) for x in "qk"}
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    shapes |= {f"{name}_layernorm": (32,) for name in norms}
    shapes |= {"mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def test_a_text_config_leaves_out_what_it_does_not_change() -> None:
    """gemma-3-4b-it says no number of heads, head_dim or vocabulary, and ties its head."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
    }
    prefix = "language_model.model"
    shapes = gemma3_block(f"{prefix}.layers.0", heads=8, head_dim=256)
    shapes |= {f"{prefix}.embed_tokens.weight": (262208, 32), f"{prefix}.norm.weight": (32,)}
    shapes |= llama_block("vision_tower.layers.0")
    spec = describe({"model_type": "gemma3", "text_config": text}, shapes)
    assert (spec.family, spec.text_config) == ("gemma3_text", ("text_config",))
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab) == (8, 4, 256, 262208)
    assert spec.tied
    assert set(spec.copied) == set(llama_block("vision_tower.layers.0"))


def test_a_checkpoint_its_familys_table_does_not_hold_for_goes_by_names() -> None:
    config = {
        "model_type": "opt",
        "hidden_size": 8,
        "ffn_dim": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 20,
        "max_position_embeddings": 16,
    }
    block = {
        **{f"self_attn.{x}_proj": (8, 8) for x in ("q", "k", "v", "out")},
        **{"self_attn_layer_norm": (8,), "fc1": (16, 8), "fc2": (8, 16), "final_layer_norm": (8,)},
    }
    linears = {f"layers.0.{name}": shape for name, shape in block.items()}
    tensors = {"embed_tokens": (20, 8), "embed_positions": (18, 8), "final_layer_norm": (8,)}
    shapes: Shapes = {f"decoder.{n}.weight": s for n, s in {**tensors, **linears}.items()}
    shapes |= {n[:-6] + "bias": s[:1] for n, s in shapes.items() if "embed" not in n}
    spec = describe(config, shapes)
    assert (spec.family, spec.heads, spec.tied) == ("opt", 2, True)
    assert ("decoder.embed_positions.weight", "model.decoder.embed_positions.weight") in (
        spec.outside
    )
    for changed in (
        {"do_layer_norm_before": False},
        {"word_embed_proj_dim": 4},
        {"layer_norm_elementwise_affine": False},
    ):
        assert describe(config | changed, shapes).family == "generic"
    same = {"do_layer_norm_before": True, "word_embed_proj_dim": 8}
    assert describe(config | same, shapes).family == "opt"


def test_a_head_goes_by_its_familys_name() -> None:
    config = CONFIG | {"model_type": "gpt_neox", "num_hidden_layers": 1, "num_key_value_heads": 4}
    block: Shapes = {
        **{"attention.query_key_value": (96, 32), "attention.dense": (32, 32)},
        **{"mlp.dense_h_to_4h": (48, 32), "mlp.dense_4h_to_h": (32, 48)},
        **{"input_layernorm": (32,), "post_attention_layernorm": (32,)},
    }
    names: Shapes = {f"layers.0.{name}": shape for name, shape in block.items()}
    names |= {"embed_in": (100, 32), "final_layer_norm": (32,)}
    shapes: Shapes = {f"gpt_neox.{name}.weight": shape for name, shape in names.items()}
    shapes |= {name[:-6] + "bias": s[:1] for name, s in shapes.items() if "embed" not in name}
    with pytest.raises(CheckpointError, match=r"tensor embed_out\.weight is missing"):
        describe(config, shapes)
    spec = describe(config, shapes | {"embed_out.weight": (100, 32)})
    assert spec.head == "embed_out.weight"
    assert spec.outside[-1] == ("embed_out.weight", "lm_head.weight")


def test_missing_tensor_is_named() -> None:
    shapes = llama()
    del shapes["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        describe(CONFIG, shapes)


def test_wrong_shape_is_named_with_both_shapes() -> None:
    shapes = llama() | {"model.layers.0.self_attn.k_proj.weight": (32, 32)}
    message = r"k_proj\.weight has shape \[32, 32\], config\.json asks for \[16, 32\]"
    with pytest.raises(CheckpointError, match=message):
        describe(CONFIG, shapes)


def test_a_bias_the_config_asks_for_must_be_there() -> None:
    with pytest.raises(CheckpointError, match=r"q_proj\.bias is missing"):
        describe(CONFIG | {"attention_bias": True}, llama())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, r"model_type is None"),
        ({"hidden_size": None}, r"no hidden_size"),
        ({"num_hidden_layers": "two"}, r"num_hidden_layers is 'two'"),
        ({"model_type": "phi3"}, r"no tensor is called '\.\.\.layers\.0\.self_attn\.qkv_proj"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        describe(CONFIG | change, llama())
    assert "\n" not in str(caught.value)


def test_unrecognised_tensors_are_listed_up_to_five_percent() -> None:
    # the block has about 7,700 parameters
    small = {"model.layers.0.self_attn.adapter.weight": (32, 1)}
    spec = describe(CONFIG, llama() | small)
    assert spec.blocks[0].unrecognised == tuple(small)
    assert spec.copied == ()
    large = {"model.layers.0.self_attn.adapter.weight": (32, 32)}
    with pytest.raises(CheckpointError, match=r"not recognised \(self_attn\.adapter\.weight\)"):
        describe(CONFIG, llama() | large)


def test_any_other_decoder_is_described_by_names_alone() -> None:
    config = CONFIG | {"model_type": "neverheardof"}
    shapes = llama("decoder") | llama_block("vision.layers.0")
    shapes["decoder.layers.0.mlp.router.weight"] = (4, 32)
    spec = describe(config, shapes)
    assert (spec.family, spec.model_type) == ("generic", "neverheardof")
    linears = {item.module: item for item in spec.blocks[0].linears}
    assert linears["self_attn.q_proj"].shared_input == linears["self_attn.v_proj"].shared_input
    assert linears["self_attn.o_proj"].role == "linear"
    assert linears["mlp.router"].role == "router"
    assert set(spec.copied) == set(llama_block("vision.layers.0"))
    assert (spec.embedding, spec.head) == ("decoder.embed_tokens.weight", "lm_head.weight")


def test_generic_blocks_in_input_major_order_are_recognised_by_their_biases() -> None:
    config, shapes = gpt2("")
    spec = describe(config | {"model_type": "gpt2ish", "n_inner": 32}, shapes)
    assert all(item.transposed for item in spec.blocks[0].linears)
    assert spec.blocks[0].linears[0].shape == (24, 8)


def test_generic_refusals() -> None:
    config = {"model_type": "neverheardof"}
    with pytest.raises(CheckpointError, match="no list of blocks"):
        describe(config, {"a.weight": (2, 2)})
    with pytest.raises(CheckpointError, match="no token embedding"):
        describe(config, {"b.0.w.weight": (2, 2)})
    with pytest.raises(CheckpointError, match=r"block model\.layers\.2 are missing"):
        describe(config | {"num_hidden_layers": 3}, llama())
    fused = llama() | {"model.layers.0.mlp.experts.gate_up_proj": (4, 32, 32)}
    with pytest.raises(CheckpointError, match="are not recognised"):
        describe(config, fused)


def test_describing_needs_no_torch() -> None:
    code = (
        "import sys; from compress.arch.describe import describe;"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\[\]\s*", out.stdout)
