"""The other way: what compressed-tensors' own compressors pack, we read bit by bit."""

from types import ModuleType
from typing import Any

import pytest
import torch

from compress.formats import compressed_tensors as codec
from compress.formats import ct_decode
from compress.quant.scheme import ActivationScheme, QuantScheme
from compressed_models import round_weight

pytestmark = pytest.mark.interop


def their_scheme(scheme: QuantScheme) -> Any:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization import QuantizationScheme as Theirs

    weights = QuantizationArgs(
        num_bits=scheme.bits,
        symmetric=scheme.symmetric,
        strategy=scheme.granularity,
        group_size=scheme.group_size or None,
    )
    act = QuantizationArgs(num_bits=8, symmetric=True, strategy="token", dynamic=True)
    return Theirs(
        targets=["Linear"], weights=weights, input_activations=act if scheme.activation else None
    )


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


def _check(scheme: QuantScheme, compressor: Any) -> None:
    """Same bytes as ours, and our reading of them has the codes, scales and values of theirs."""
    weight = torch.randn(13, 40, generator=torch.Generator().manual_seed(scheme.bits))
    ours = round_weight(weight, scheme)
    flat = scheme.granularity == "tensor"
    state = {"weight": weight, "weight_scale": ours.scale.reshape(1) if flat else ours.scale}
    if ours.zero is not None:
        state["weight_zero_point"] = ours.zero.reshape(1) if flat else ours.zero
    theirs = compressor.compress(state, their_scheme(scheme))
    written = {f"m.{name}": tensor for name, tensor in theirs.items()}
    parts = codec.encode("m.weight", ours)
    assert written.keys() == parts.keys()
    for name, tensor in parts.items():
        assert torch.equal(written[name], tensor), name
        assert written[name].dtype == tensor.dtype
    back = ct_decode.decode("m.weight", scheme, written.__contains__, written.__getitem__)
    assert torch.equal(back.codes, ours.codes)
    dense = compressor.decompress(theirs, their_scheme(scheme))["weight"]
    assert torch.equal(back.dequantize(), dense)
