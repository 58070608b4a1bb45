"""What memory allows an engine to keep."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from compress.machine.memory import available_bytes, cache_bytes
from compress.runtime.decoder.linear import embedding_bytes, weight_bytes
from compress.runtime.forms.decoded import MOST_DECODED
from compress.runtime.forms.form import Arithmetic

if TYPE_CHECKING:
    from compress.formats import Weights

# What weights may take of the free memory with codes decoded that no product reads.
DECODED_SHARE = 0.5

# What they may take of a processor's largest cache in bf16, all codes decoded. Where caches hold
# them, codes have no bytes to save, and decoding them for every product costs time: on tale-6m
# (12 MB) codes wrote 0.47 to 0.8 times the tokens of their source with one text, 0.82 to 1.05 with
# 64.
CACHE_SHARE = 0.5


def free_bytes(device: str) -> int | None:
    """None where the system does not say."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def kept_bytes(weights: "Weights", how: Arithmetic) -> int:
    """The embedding counts twice: while a tensor is read it is there as it is stored, too."""
    return weight_bytes(weights, how) + 2 * embedding_bytes(weights, how)


def with_room(weights: "Weights", how: Arithmetic, free: int | None) -> Arithmetic:
    """Large codes that no product reads are decoded for every product where memory is short, and
    all codes once where caches have room for all weights in bf16. free: bytes, less what is asked
    for beside weights. Nothing is read."""
    if free is not None and kept_bytes(weights, how) > DECODED_SHARE * free:
        return replace(how, most_decoded=min(how.most_decoded, MOST_DECODED))
    if how.device.type != "cpu" or how.dtype != torch.bfloat16:
        return how  # int16 decodes nothing in fp32
    decoded = replace(how, all_decoded=True)
    return decoded if weight_bytes(weights, decoded) <= CACHE_SHARE * cache_bytes() else how


def settled_arithmetic(weights: "Weights", how: Arithmetic) -> Arithmetic:
    """As an engine that is opened now has it, with a cache of the usual size."""
    if how.device.type != "cpu":
        return how  # nothing is decoded there that could stay codes
    return with_room(weights, how, available_bytes())
