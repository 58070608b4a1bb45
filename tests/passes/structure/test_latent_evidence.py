"""What is seen of attention is what transformers computes, token by token."""

import torch

from compress.arch.describe import describe
from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, token_batches, walk
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.passes.ranks import ONE_RANK
from compress.passes.structure.attention.latents import look_at_attention

HEADS, GROUPS, WIDTH, LENGTH = 4, 2, 16, 12


def test_what_is_seen_is_what_transformers_attends_to(tiny, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny("llama", dtype="fp32")
    ids = torch.randint(0, 100, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    inputs: dict[str, torch.Tensor] = {}
    attention = model.model.layers[0].self_attn
    for name in "qkv":
        attention.get_submodule(f"{name}_proj").register_forward_hook(
            lambda _, args, out, name=name: inputs.__setitem__(name, out.double())
        )
    with torch.no_grad():
        shares = model(ids, output_attentions=True).attentions[0].double()  # [rows, H, T, T]
    apart = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    angles = apart[..., None] * model.model.rotary_emb.inv_freq.double()
    turns = torch.polar(torch.ones((), dtype=torch.float64), angles)
    rotation = torch.einsum("bhts,tsf->bhtf", shares.to(turns.dtype), turns).mean(dim=(0, 2))
    received = shares.sum(dim=2).mean(dim=1)  # [rows, T]
    states = torch.cat([inputs["k"], inputs["v"]], dim=-1)

    checkpoint = Checkpoint.open(folder)
    weights = open_weights(checkpoint, describe(checkpoint.config, checkpoint.shapes))
    skeleton = Skeleton(checkpoint.config, weights.spec, dtype=torch.float32)
    batches = token_batches(ids, None, 2)
    shapes = [(*batch.ids.shape, 64) for batch in batches]
    with HiddenStates(tmp_path / "states", shapes, torch.float32, budget=1 << 20) as kept:
        chain = Chain(skeleton, weights, batches, (kept,))
        chain.embed()
        seen = look_at_attention(next(iter(walk(chain))), weights, ONE_RANK)
    torch.testing.assert_close(seen.rotation, rotation, rtol=1e-5, atol=1e-6)
    expected = torch.einsum("bt,bti,btj->ij", received, states, states) / ids.numel()
    torch.testing.assert_close(seen.states, expected, rtol=1e-4, atol=1e-5)
    q = inputs["q"].unflatten(-1, (HEADS, WIDTH))
    asked = torch.einsum("bthi,bthj->hij", q, q) / ids.numel()
    torch.testing.assert_close(seen.queries, asked, rtol=1e-4, atol=1e-5)
    output = attention.o_proj.weight.detach().double().unflatten(1, (GROUPS, -1, WIDTH))
    torch.testing.assert_close(seen.outputs, torch.einsum("nghi,nghj->gij", output, output))
