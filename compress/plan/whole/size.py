"""What a GGUF file takes beside the calibration: the rounding of its blocks, and its proof."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from compress.arch.spec import DecoderSpec
from compress.plan import probes
from compress.plan.probes import MachineRates
from compress.quant.ggml_kinds import KINDS, SUPER_BLOCK
from compress_exporters.gguf.proof_size import (
    DECODED,
    NUMBER_BYTES,
    proof_bytes,
    proved_tokens,
)
from compress_kernels import round_blocks

# Rows and columns of the weight that is rounded to see how fast that goes.
PROBED = (64, 4 * SUPER_BLOCK)


@dataclass(frozen=True, slots=True)
class FileSize:
    """spec: of the model in the file. rounded: how many weights become blocks of each kind; a key
    of KINDS. None of them where codes go over as they are."""

    spec: DecoderSpec
    rounded: Mapping[str, int] = field(default_factory=dict)

    @property
    def proof_bytes(self) -> int:
        """Of the two models, and what is beside them while the second is read."""
        return proof_bytes(self.spec)


def blocks_seconds(file: FileSize) -> float:
    """One search of the scales and codes of all weights that become blocks."""
    return sum(count / _rate(kind) for kind, count in file.rounded.items())


def proof_seconds(file: FileSize, rates: MachineRates) -> float:
    """Of the package gguf, which decodes on one thread, of passes over all numbers, and of what
    both models compute."""
    decoding = sum(count * _decoded_seconds(kind) for kind, count in file.rounded.items())
    passing = NUMBER_BYTES / rates.elementwise
    products = 2.0 * proved_tokens() / rates.product_fp32
    return DECODED * decoding + file.spec.all_numbers() * (passing + products)


def _rate(kind: str) -> float:
    """Weights a second into blocks of a kind, as they are rounded under calibration."""

    def make() -> probes.Call:
        weight, importance = torch.rand(PROBED), torch.rand(PROBED[1])
        return lambda: round_blocks(kind, weight, importance)

    return PROBED[0] * PROBED[1] / probes.probe(make).seconds


def _decoded_seconds(kind: str) -> float:
    """A weight of a kind by the package gguf."""
    from gguf import GGMLQuantizationType, dequantize

    def make() -> probes.Call:
        data = torch.zeros(PROBED[0], KINDS[kind].nbytes(PROBED[1]), dtype=torch.uint8).numpy()
        return partial(dequantize, data, GGMLQuantizationType(KINDS[kind].number))

    each = probes.probe(make).seconds * torch.get_num_threads()
    return each / (PROBED[0] * PROBED[1])
