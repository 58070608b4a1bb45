"""Latents whose norm leaves them as they are, made plain for a training and small again."""

import torch

from compress.arch.describe import describe
from compress.blocks.landed import KEPT, NORM_WEIGHT, SMALL, land, unland
from compress.blocks.skeleton import Skeleton
from compress.checkpoint import Checkpoint
from compress.formats import open_weights


def test_a_landed_latent_becomes_plain_and_comes_back_to_the_bit(tiny) -> None:
    """The block computes the same in both forms; any other latent stays as it is."""
    options = {"q_lora_rank": 24, "attention_bias": True, "dtype": "fp32"}
    checkpoint = Checkpoint.open(tiny("deepseek_v3", **options))
    weights = open_weights(checkpoint, describe(checkpoint.config, checkpoint.shapes))
    skeleton = Skeleton(checkpoint.config, weights.spec, dtype=torch.float32)
    spec = weights.spec.blocks[0]
    module = skeleton.load_block(weights, 0)
    assert unland(module, spec, "deepseek_v3") == {}
    attention = module.self_attn
    for linear, norm, rows in (
        (attention.kv_a_proj_with_mqa, attention.kv_a_layernorm, 32),
        (attention.q_a_proj, attention.q_a_layernorm, 24),
    ):
        linear.weight[:rows] *= SMALL
        linear.bias[:rows] *= SMALL
        norm.weight.fill_(NORM_WEIGHT)
    tensors = {name: module.get_parameter(path).clone() for name, path in spec.modules}
    ids = torch.arange(12)[None]
    hidden = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0))
    before = skeleton.run_block(module, 0, hidden, skeleton.context(ids))
    changed = unland(module, spec, "deepseek_v3")
    torch.testing.assert_close(
        skeleton.run_block(module, 0, hidden, skeleton.context(ids)), before, rtol=1e-5, atol=1e-6
    )
    assert sorted(changed.values()) == [0, 0, 24, 24, 32, 32]
    paths = dict(spec.modules)
    plain = {name: module.get_parameter(paths[name]) for name, rows in changed.items() if rows}
    assert all(float(value.abs().max()) > 1e-3 for value in plain.values())
    assert all(torch.equal(value, tensors[name]) for name, value in land(plain, changed).items())
    assert KEPT == 1e3 * NORM_WEIGHT * SMALL
