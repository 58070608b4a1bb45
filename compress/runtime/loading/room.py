"""What memory allows an engine to keep."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from compress.machine.memory import available_bytes
from compress.runtime.decoder.linear import embedding_bytes, weight_bytes
from compress.runtime.forms.decoded import MOST_DECODED
from compress.runtime.forms.form import Arithmetic

if TYPE_CHECKING:
    from compress.formats import Weights

# What weights may take of the free memory with codes decoded that no product reads.
DECODED_SHARE = 0.5


def free_bytes(device: str) -> int | None:
    """None where the system does not say."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def kept_bytes(weights: "Weights", how: Arithmetic) -> int:
    """The embedding counts twice: while a tensor is read it is there as it is stored, too."""
    return weight_bytes(weights, how) + 2 * embedding_bytes(weights, how)


def with_room(weights: "Weights", how: Arithmetic, free: int | None) -> Arithmetic:
    """Large codes that no product reads are decoded for every product where memory is short. free:
    bytes, less what is asked for beside weights. Nothing is read."""
    if free is None or kept_bytes(weights, how) <= DECODED_SHARE * free:
        return how
    return replace(how, most_decoded=min(how.most_decoded, MOST_DECODED))


def settled_arithmetic(weights: "Weights", how: Arithmetic) -> Arithmetic:
    """As an engine that is opened now has it, with a cache of the usual size."""
    if how.device.type != "cpu":
        return how  # nothing is decoded there that could stay codes
    return with_room(weights, how, available_bytes())
