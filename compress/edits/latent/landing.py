"""Latent attention in the tensors of DeepseekV3Attention, of transformers 5.23.

That class puts an RMS norm over the latent, with an eps of 1e-6. The rows that make the latent are
so small here (2^-23) that its mean square is nothing beside the eps: the norm then multiplies by
1000 and its weight, whatever the token. With a weight of 8192 that is 1000 / 1024 of the latent,
and what reads it is 1024 / 1000 as large. Powers of two round nothing, in no dtype; the error is
7e-9 of a latent times its mean square. fp16 has no numbers that small.

Rotated numbers lie in twos (`rope_interleave`). Scores are divided by √(D + rotated) there,
whatever the source divides them by, so queries are larger. The class has biases where queries come
out of a latent of their own only: then that is all of what queries read, and one number that is
always 1, whose columns are the bias.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.blocks.landed import KEPT, NORM_WEIGHT, SMALL
from compress.edits.latent.evidence import AttentionEvidence
from compress.edits.latent.joint import JointLatent
from compress.edits.latent.rotated import RotatedKey, turned_on_average
from compress.edits.repair.ridge import Affine

UNDONE = 1 / KEPT  # of what reads a latent


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """What keys and values become. scale: what the source multiplies scores by, all that it
    multiplies rotated queries and keys by included."""

    key: RotatedKey
    joint: JointLatent
    scale: float


def landed(
    parts: Mapping[str, Affine], seen: AttentionEvidence, made: Latents, *, biased: bool
) -> dict[str, Tensor]:
    """Tensors by their names below attention, fp64. parts: "q", "k" and "v" of the source. biased:
    whether attention gets biases, as any of its linears has one."""
    q, k, v = (with_bias(parts[role], biased=biased) for role in "qkv")
    latent = made.joint.into @ torch.cat([k, v])
    down = torch.cat([SMALL * latent, _rotated_rows(k, seen, made.key)])
    queries = _queries(q, seen, made)
    rank, inputs = len(latent), parts["q"].weight.shape[1]
    tensors = {
        "kv_a_proj_with_mqa.weight": down[:, :inputs],
        "kv_a_layernorm.weight": queries.new_full((rank,), NORM_WEIGHT),
        "kv_b_proj.weight": UNDONE * _unfolding(seen, made.joint),
    }
    if not biased:
        return {"q_proj.weight": queries, **tensors}
    one = torch.zeros(inputs + 1, dtype=q.dtype, device=q.device)
    one[-1] = SMALL
    return {
        "q_a_proj.weight": SMALL * torch.eye(inputs + 1, inputs, dtype=q.dtype, device=q.device),
        "q_a_proj.bias": one,
        "q_a_layernorm.weight": queries.new_full((inputs + 1,), NORM_WEIGHT),
        "q_b_proj.weight": UNDONE * queries,
        **tensors,
        "kv_a_proj_with_mqa.bias": down[:, inputs],
    }


def with_bias(part: Affine, *, biased: bool) -> Tensor:
    """[out, in] in fp64, with the bias as one more column where any linear has one."""
    weight = part.weight.double()
    if not biased:
        return weight
    bias = weight.new_zeros(len(weight)) if part.bias is None else part.bias.double()
    return torch.cat([weight, bias[:, None]], dim=1)


def _rotated_rows(k: Tensor, seen: AttentionEvidence, key: RotatedKey) -> Tensor:
    """Rows of the shared key: [2 * S, in]."""
    heads = torch.unflatten(k, 0, (seen.groups, -1))
    numbers = seen.turned.numbers(heads.mT)[..., key.made_of]  # [G, in, M, S]
    return _in_twos(torch.einsum("gms,gims->is", key.key_in, numbers)).T


def _queries(q: Tensor, seen: AttentionEvidence, made: Latents) -> Tensor:
    """Rows of all query heads, what is not rotated before what is: [H * (D + 2 * S), in]."""
    heads = torch.unflatten(q, 0, (seen.heads, -1))
    plain = turned_on_average(seen) @ heads
    numbers = seen.turned.numbers(heads.mT)[..., made.key.made_of]  # [H, in, M, S]
    reads = made.key.key_out.repeat_interleave(seen.heads // seen.groups, dim=0)
    turned = _in_twos((numbers * reads.conj()[:, None]).sum(dim=2)).mT
    whole = torch.cat([plain, turned], dim=1)
    whole = whole * (made.scale * math.sqrt(whole.shape[1]))
    return whole.flatten(0, 1)


def _unfolding(seen: AttentionEvidence, joint: JointLatent) -> Tensor:
    """Keys before values, head by head: [H * (D + V), R]."""
    group = torch.cat([joint.keys, joint.values], dim=1)
    return group.repeat_interleave(seen.heads // seen.groups, dim=0).flatten(0, 1)


def _in_twos(numbers: Tensor) -> Tensor:
    """Complex [..., S] as [..., 2 * S], real and imaginary part of each side by side."""
    return torch.view_as_real(numbers).flatten(-2)
