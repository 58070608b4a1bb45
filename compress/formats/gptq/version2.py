"""GPTQ's version 2 (gptqmodel's "gptq_v2"): zero points as they are, all else as in gptq.py."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from compress.arch.spec import DecoderSpec
from compress.formats.gptq import codec as gptq
from compress.formats.gptq import config as gptq_config
from compress.formats.gptq.codec import PARTS, gather, layout, weight_shape, why_not
from compress.formats.gptq.config import read_schemes
from compress.formats.storage import WeightStorage
from compress.formats.stored import Beside, Has, Parts, Read, Stored
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

NAME = gptq_config.V2

__all__ = [
    "NAME",
    "PARTS",
    "beside",
    "decode",
    "encode",
    "gather",
    "layout",
    "quantization_config",
    "read_schemes",
    "weight_shape",
    "why_not",
]


def encode(how: WeightStorage, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """As gptq.encode, for any zero points."""
    return gptq.encode(how, tensor, version=2)


def decode(name: str, scheme: QuantScheme, has: Has, read: Read) -> QuantizedTensor:
    """As gptq.decode."""
    return gptq.decode(name, scheme, has, read, version=2)


def beside(stored: Stored, parts: Parts) -> Beside:
    """As gptq.beside."""
    return gptq.beside(stored, parts, version=2)


def quantization_config(
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    schemes: Mapping[str, QuantScheme],
    *,
    with_g_idx: Collection[str] = (),
    kv_cache: object = None,
) -> dict[str, Any] | None:
    """As gptq's, with the version in it."""
    return gptq_config.quantization_config(
        spec, shapes, schemes, with_g_idx=with_g_idx, kv_cache=kv_cache, version=NAME
    )
