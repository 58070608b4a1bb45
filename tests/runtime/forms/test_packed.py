"""Packed weights: the numbers of the checkpoint in about its bytes, whatever a step holds."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.quant.scheme import PRESETS, QuantScheme
from compress.quant.tensor import OutlierColumns, QuantizedTensor
from compress.runtime.decoder.linear import Linear
from compress.runtime.forms import packed
from compress.runtime.forms.dense import FloatWeight
from compress.runtime.forms.form import Arithmetic, LinearFacts
from compress.runtime.forms.packed import DecodedTiles, PackedWeight
from compress.runtime.forms.panels import PackedPanels
from compress_kernels.cpu.library import native
from helpers import compressed_models, tiny_models
from helpers.engine.flat_runs import load

CPU = torch.device("cpu")
N, K = 200, 256
SCHEMES: Mapping[str, QuantScheme] = {
    **PRESETS,
    "int3 in channels": QuantScheme(bits=3, granularity="channel", group_size=0),
    "int8 for the tensor": QuantScheme(bits=8, granularity="tensor", group_size=0),
}


def rounded(scheme: QuantScheme, columns: int = K, *, act_order: bool = False) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(scheme.bits)
    weight = (torch.randn(N, columns, generator=generator) * 0.05).bfloat16()
    found = compressed_models.round_weight(weight, scheme, act_order=act_order)
    if scheme.activation is not None and scheme.activation.outliers == "calibrated":
        columns_kept = torch.tensor([3, 77])
        kept = OutlierColumns(columns_kept, weight[:, columns_kept] * 9)
        return replace(found, outliers=kept)
    return found


def tiled(weight: PackedWeight) -> Tensor:
    return torch.cat([weight.dequantize(rows, torch.float32) for rows in weight.tiles()])


@pytest.mark.parametrize("name", SCHEMES)
def test_tiles_are_the_weight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "DECODED", 48 * K)
    tensor = rounded(SCHEMES[name])
    weight = PackedWeight.of(tensor, CPU)
    assert len(list(weight.tiles())) > 1
    assert torch.equal(tiled(weight), tensor.dequantize())


def test_what_else_a_tensor_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "DECODED", 48 * K)
    scheme = QuantScheme(bits=4, group_size=32, symmetric=False)
    for tensor in (
        rounded(scheme, act_order=True),
        rounded(scheme, 250),
        replace(rounded(scheme), input_factor=torch.rand(K) + 0.5),
        replace(rounded(PRESETS["NVFP4A16"]), global_scale=None, global_factor=torch.rand(1)),
    ):
        assert torch.equal(tiled(PackedWeight.of(tensor, CPU)), tensor.dequantize())


def test_values_are_rounded_as_evaluation_does() -> None:
    tensor = rounded(QuantScheme(bits=4, group_size=32))
    weight = PackedWeight.of(tensor, CPU, torch.bfloat16)
    assert torch.equal(tiled(weight), tensor.dequantize(torch.bfloat16).float())
    assert not torch.equal(tiled(weight), tensor.dequantize())


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        (QuantScheme(bits=2, group_size=64), 2 + 16 / 64),
        (QuantScheme(bits=3, granularity="channel", group_size=0), 3 + 16 / K),
        (QuantScheme(bits=4, group_size=32), 4 + 16 / 32),
        (PRESETS["NVFP4A16"], 4 + 8 / 16 + 32 / (N * K)),
        (PRESETS["FP8_DYNAMIC"], 8 + 16 / K),
    ],
    ids=lambda x: x.describe() if isinstance(x, QuantScheme) else "",
)
def test_bytes_are_the_packed_ones(scheme: QuantScheme, bits: float) -> None:
    assert PackedWeight.of(rounded(scheme), CPU).nbytes == round(bits * N * K / 8)


@pytest.mark.parametrize("columns", [K, 250])
@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_are_told_before(name: str, columns: int) -> None:
    """But for numbers of the whole weight, and columns that calibration fixed."""
    tensor = rounded(SCHEMES[name], columns)
    facts = LinearFacts((N, columns), tensor.scheme, tensor.scale.dtype, torch.bfloat16)
    how = Arithmetic(torch.float32, CPU)
    packed_weight = DecodedTiles().pack(tensor, facts, how)
    rest = packed_weight.rest
    more = [rest.global_scale, rest.input_scale]
    more += [rest.outliers.columns, rest.outliers.weight] if rest.outliers else []
    told = DecodedTiles().nbytes(facts, how)
    assert packed_weight.nbytes == told + sum(x.nbytes for x in more if x is not None)


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_have_the_same_bits_whatever_their_number(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others, and the product is the one with the whole weight."""
    monkeypatch.setattr(packed, "DECODED", 48 * K)
    tensor = rounded(SCHEMES[name])
    inputs = tensor.inputs()
    layer = Linear(PackedWeight.of(tensor, CPU), torch.randn(N), inputs)
    x = torch.randn(512, K) * 3
    whole = layer(x)
    for start, stop in ((0, 16), (16, 64), (100, 116), (0, 512 - 16)):
        assert torch.equal(layer(x[start:stop]), whole[start:stop])
    plain = Linear(FloatWeight(tensor.dequantize()), layer.bias, inputs)
    torch.testing.assert_close(whole, plain(x), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(native().library is None, reason=native().reason)
def test_a_loaded_model_takes_about_the_bytes_of_its_codes(tmp_path: Path) -> None:
    """Memory that its linears hold, views counted with all they are views of."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    source = tiny_models.make("llama", tmp_path / "source", dtype="bf16", **sizes)
    compressed_models.write(source, tmp_path / "out", QuantScheme(bits=4, group_size=128))
    held, numbers = 0, 0
    for layer in load(tmp_path / "out").layers:
        attention, mlp = layer.attention, layer.mlp
        for linear in (*attention.qkv.linears, attention.out, *mlp.inner.linears, mlp.down):
            assert isinstance(linear.weight, PackedPanels)
            numbers += linear.weight.shape[0] * linear.weight.shape[1]
            tensors = [linear.weight.panels.codes, linear.weight.panels.scales]
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
            held += sum(storage.nbytes() for storage in storages.values())
    assert held * 8 <= numbers * (4 + 16 / 128)
