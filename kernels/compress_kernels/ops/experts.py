"""Which experts of a mixture compute a token."""

import torch
from torch import Tensor

from compress_kernels.cpu import experts as cpu_experts
from compress_kernels.cpu.library import native
from compress_kernels.ops.checks import wrong
from compress_kernels.reference import experts as reference_experts


def choose_experts(logits: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Shares, fp32, and numbers, int64, of the `chosen` experts with the largest softmax of the
    logits, the largest first, of equals the lowest number: [T, chosen] each.

    logits: fp32 [T, experts]. normalised: a token's shares add up to 1. Raises ValueError for
    another dtype, and for fewer experts than are chosen.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.shape[1] < chosen:
        raise wrong("logits", logits, f"torch.float32 [tokens, {chosen} or more]")
    if logits.device.type == "cpu" and native().library is not None:
        return cpu_experts.choose_experts(logits, chosen, normalised)
    return reference_experts.choose_experts(logits, chosen, normalised)
