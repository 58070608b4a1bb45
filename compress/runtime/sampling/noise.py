"""Noise of sampling: a number for each (seed, index of the output, position, token).

It is a hash of these four and of nothing else, so what is drawn does not depend on what else is
computed, nor on how often it is computed anew.
"""

import struct
from collections.abc import Sequence as Several
from hashlib import blake2b

import torch
from torch import Tensor

Key = tuple[int, int]  # two signed numbers of 32 bits

# Odd numbers that spread every bit of a product, as signed 32-bit numbers; the last two are those
# of Wellons' hash "lowbias32".
_SPREAD, _FIRST, _SECOND = 0x9E3779B9 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32


def key_of(seed: int, index: int, position: int) -> Key:
    """Of the token at a position (prompt included) of output `index`. seed: 0 to 2**64 - 1."""
    data = struct.pack("<QQQ", seed, index, position)
    first, second = struct.unpack("<ii", blake2b(data, digest_size=8).digest())
    return first, second


def gumbel(keys: Several[Key], vocabulary: int, device: torch.device) -> Tensor:
    """Gumbel noise, fp32 [keys, vocabulary].

    The token with the largest (logit + noise) is a draw from the softmax of the logits.
    """
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=device) * _SPREAD
    first, second = torch.tensor(keys, dtype=torch.int32, device=device).unbind(1)
    bits = _mix(tokens ^ first[:, None])
    bits = _mix(bits.bitwise_xor_(second[:, None]))
    # The large draws decide, and they come from small numbers, which floats tell apart best.
    unit = bits.bitwise_and_(2**31 - 1).float().add_(0.5).mul_(2.0**-31)
    unit.clamp_(max=1 - 2.0**-24)
    return unit.neg_().log1p_().neg_().log_().neg_()


def _mix(bits: Tensor) -> Tensor:
    """Overwrites int32 with a hash of it: every input bit reaches every output bit."""
    for shift, factor in ((16, _FIRST), (15, _SECOND)):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(factor)
    return bits.bitwise_xor_(_shifted(bits, 16))


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Zeros come in from the left."""
    return bits.bitwise_right_shift(shift).bitwise_and_(2 ** (32 - shift) - 1)
