"""Frequencies and rotations are transformers', wherever in a batch a token lies."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.arch.forward.rope import RopeRule, rope_of
from compress.runtime.decoder.rope import Rotation
from compress_kernels.ops.rows import rotate

CPU = torch.device("cpu")
FACTORS = {
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [1.0 + 0.7 * i for i in range(16)],
}
STRETCHED = {"factor": 8.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        **STRETCHED,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {"rope_type": "yarn", **STRETCHED},
    "yarn, not cut": {"rope_type": "yarn", **STRETCHED, "truncate": False},
    "yarn, with betas": {"rope_type": "yarn", **STRETCHED, "beta_fast": 4, "beta_slow": 2},
    "yarn, by mscale": {"rope_type": "yarn", **STRETCHED, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn, by factor": {"rope_type": "yarn", **STRETCHED, "attention_factor": 1.7},
    "longrope": {"rope_type": "longrope", **STRETCHED, **FACTORS},
    "longrope, by ratio": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        **FACTORS,
    },
}
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "max_position_embeddings": 256,
}


def theirs(parameters: dict[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of one text of transformers' llama."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**SIZES, rope_parameters={"rope_theta": 5e5, **parameters})
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return cos[0, :, :16], sin[0, :, :16]


def ours(parameters: dict[str, Any]) -> Rotation:
    text = {**SIZES, "rope_parameters": {"rope_theta": 5e5, **parameters}}
    return Rotation.of(rope_of(RopeRule(), text, 32, 256), CPU)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [40, 64, 200, 256, 257, 600])
def test_angles_of_a_prompt(kind: str, length: int) -> None:
    positions = torch.arange(length)
    got = ours(KINDS[kind]).angles(positions, torch.full((length,), length))
    for mine, their in zip(got, theirs(KINDS[kind], positions), strict=True):
        # An angle of 600 has fp32 steps of 6e-5.
        torch.testing.assert_close(mine, their, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["default", "longrope", "dynamic"])
def test_a_tokens_angles_are_its_own(kind: str) -> None:
    rotation = ours(KINDS[kind])
    positions = torch.tensor([3, 299, 3, 70, 0, 500])
    lengths = torch.tensor([10, 300, 300, 10, 65, 64])
    whole = rotation.angles(positions, lengths)
    for i in range(6):
        alone = rotation.angles(positions[i : i + 1], lengths[i : i + 1])
        assert all(torch.equal(w[i : i + 1], a) for w, a in zip(whole, alone, strict=True))
    same = torch.equal(whole[0][0], whole[0][2])
    assert same == (kind == "default"), "a long prompt stretches all of its positions"


def test_texts_of_one_variant_share_their_angles() -> None:
    long, dynamic = ours(KINDS["longrope"]), ours(KINDS["dynamic"])
    assert [long.rope.variant(n) for n in (1, 64, 65, 300)] == [0, 0, 1, 1]
    assert [dynamic.rope.variant(n) for n in (1, 256, 257, 300)] == [0, 0, 257, 300]
    assert ours(KINDS["yarn"]).rope.variant(10**6) == 0
    positions = torch.arange(80)
    one, other = (long.angles(positions, torch.full((80,), n))[0] for n in (65, 300))
    assert torch.equal(one, other)
    one, other = (long.angles(positions, torch.full((80,), n))[0] for n in (1, 64))
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", [16, 5])
def test_heads_are_turned_as_transformers_turns_them(dtype: torch.dtype, pairs: int) -> None:
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(7, 3, 32, generator=generator).to(dtype)
    angles = torch.randn(7, pairs, generator=generator)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    doubled = (torch.cat((x, x), -1)[None] for x in (cos, sin))
    want, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], *doubled)
    assert torch.equal(rotate(q, cos, sin), want[0].transpose(0, 1))


def test_in_a_wider_dtype_it_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(7, 3, 32, generator=generator).bfloat16()
    angles = torch.randn(7, 16, generator=generator)
    got = rotate(q, angles.cos(), angles.sin())
    assert torch.equal(got, rotate(q.float(), angles.cos(), angles.sin()).bfloat16())
