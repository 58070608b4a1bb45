"""The other way: what compressed-tensors' own compressors pack, we read bit by bit."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.formats.compressed_tensors import decode as ct_decode
from compress.formats.compressed_tensors import encode as codec
from compress.formats.compressed_tensors.config import scheme_to_config
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from helpers.compressed_models import encoded, round_weight

pytestmark = pytest.mark.interop


def their_scheme(scheme: QuantScheme) -> Any:
    """A scheme as the quantization_config that we write says it, validated by their classes."""
    from compressed_tensors.quantization import QuantizationScheme as Theirs

    return Theirs(targets=["Linear"], **scheme_to_config(scheme, False))


def scheme_of(
    bits: int, symmetric: bool, granularity: Any, activation: ActivationScheme | None = None
) -> QuantScheme:
    size = 8 if granularity == "group" else 0
    return QuantScheme(bits, symmetric, granularity, size, activation)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_pack_quantized(
    compressed_tensors: ModuleType, bits: int, symmetric: bool, granularity: str
) -> None:
    from compressed_tensors.compressors import PackedQuantizationCompressor

    _check(scheme_of(bits, symmetric, granularity), PackedQuantizationCompressor)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int_quantized(compressed_tensors: ModuleType, symmetric: bool) -> None:
    from compressed_tensors.compressors import IntQuantizationCompressor

    _check(scheme_of(8, symmetric, "channel", ActivationScheme()), IntQuantizationCompressor)


FLOATS = ["FP8", "FP8_DYNAMIC", "FP8_BLOCK"]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("size", [8, 64])
def test_float_quantized(compressed_tensors: ModuleType, name: str, size: int) -> None:
    from compressed_tensors.compressors import FloatQuantizationCompressor

    scheme = PRESETS[name]
    block = scheme.granularity == "block"
    _check(replace(scheme, group_size=size) if block else scheme, FloatQuantizationCompressor)


def test_nvfp4(compressed_tensors: ModuleType) -> None:
    """Their weights are in bf16."""
    from compressed_tensors.compressors import NVFP4PackedCompressor

    _check(PRESETS["NVFP4A16"], NVFP4PackedCompressor, torch.bfloat16)


def test_static_integers(compressed_tensors: ModuleType) -> None:
    from compressed_tensors.compressors import IntQuantizationCompressor

    _check(PRESETS["W8A8_STATIC"], IntQuantizationCompressor)


def _check(scheme: QuantScheme, compressor: Any, dtype: torch.dtype = torch.float32) -> None:
    """Same bytes as ours, and our reading of them has the codes, scales and values of theirs.

    dtype: of the weights that their compressor gives back.
    """
    columns = 48 if scheme.is_fp4 else 40
    weight = torch.randn(13, columns, generator=torch.Generator().manual_seed(scheme.bits)) / 10
    ours = round_weight(weight, scheme)
    flat = scheme.granularity == "tensor"
    scale = ours.scale.float()  # NVFP4's they cast to E4M3 themselves
    state = {"weight": weight, "weight_scale": scale.reshape(1) if flat else scale}
    if ours.global_scale is not None:
        state["weight_global_scale"] = ours.global_scale
    if ours.input_scale is not None:
        state["input_scale"] = ours.input_scale
    if ours.zero is not None:
        state["weight_zero_point"] = ours.zero.reshape(1) if flat else ours.zero
    theirs = compressor.compress(state, their_scheme(scheme))
    written = {f"m.{name}": tensor for name, tensor in theirs.items()}
    parts = encoded(codec, "m.weight", ours)
    assert written.keys() == parts.keys()
    for name, tensor in parts.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(*(_bytes(t) for t in (written[name], tensor))), name
    back = ct_decode.decode("m.weight", scheme, written.__contains__, written.__getitem__)
    assert torch.equal(_bytes(back.codes), _bytes(ours.codes))
    dense = compressor.decompress(theirs, their_scheme(scheme))["weight"]
    assert dense.dtype == dtype
    assert torch.equal(back.dequantize(dtype), dense)


def _bytes(tensor: Tensor) -> Tensor:
    """For a comparison that tells 0 from -0, as their codes do."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
