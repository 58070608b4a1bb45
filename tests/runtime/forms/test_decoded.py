"""Codes that are decoded once: the numbers, the bits and the one call of dense weights."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from compress.arch.forward.forward import describe_forward
from compress.arch.spec import LinearSpec
from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.quant.scheme import PRESETS, QuantScheme
from compress.quant.tensor import OutlierColumns, QuantizedTensor
from compress.runtime.decoder.build import Loader
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.linear import refusals, weight_bytes
from compress.runtime.forms import table
from compress.runtime.forms.decoded import MOST_DECODED, DecodedOnce
from compress.runtime.forms.dense import FloatWeight
from compress.runtime.forms.form import Arithmetic, LinearFacts
from compress.runtime.forms.packed import DecodedTiles
from compress.runtime.forms.panels import PanelsForm
from compress.runtime.forms.table import choose, pack_codes
from compress.speed.products import workload_of
from compress_kernels.cpu.library import native
from helpers import compressed_models, tiny_models
from helpers.engine.flat_runs import Runs

CPU = torch.device("cpu")
FP32, G4 = Arithmetic(torch.float32, CPU), QuantScheme(bits=4, group_size=4)
N, K = 40, 96
CALIBRATED = PRESETS["LLM_INT8_CALIBRATED"]
SQUARES = QuantScheme(bits=8, granularity="block", group_size=24)
W4A8 = replace(PRESETS["W8A8"], bits=4, granularity="group", group_size=4)

needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)


def made(scheme: QuantScheme, *, act_order: bool = False) -> QuantizedTensor:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = compressed_models.round_weight(weight, scheme, act_order=act_order)
    if scheme is CALIBRATED:
        columns = torch.tensor([3, 77])
        return replace(found, outliers=OutlierColumns(columns, weight[:, columns] * 9))
    return found


TENSORS = {
    "g4": made(G4),
    "asymmetric, act-order": made(replace(G4, symmetric=False), act_order=True),
    "squares": made(SQUARES),
    "rounded inputs": made(W4A8),
    "outliers": made(CALIBRATED),
    "factors": replace(made(G4), input_factor=torch.linspace(0.5, 2.0, K)),
    "factors, rounded inputs": replace(made(W4A8), input_factor=torch.linspace(0.5, 2.0, K)),
}


def facts_of(tensor: QuantizedTensor, plain: torch.dtype) -> LinearFacts:
    factored = tensor.input_factor is not None
    return LinearFacts(tensor.shape, tensor.scheme, tensor.scale.dtype, plain, factored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plain", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TENSORS)
def test_products_have_the_bits_of_tiles(name: str, plain: torch.dtype, dtype: torch.dtype) -> None:
    tensor, how = TENSORS[name], Arithmetic(dtype, CPU)
    facts = facts_of(tensor, plain)
    once, tiled = (form.pack(tensor, facts, how) for form in (DecodedOnce(), DecodedTiles()))
    x, bias, inputs = torch.randn(32, K).to(dtype), torch.randn(N).to(dtype), tensor.inputs()
    assert torch.equal(once.matmul(x, inputs, bias), tiled.matmul(x, inputs, bias))
    assert once.nbytes == DecodedOnce().nbytes(facts, how)
    if isinstance(once, FloatWeight):
        assert torch.equal(once.values.to(dtype), tensor.dequantize(plain).to(dtype))


def test_large_weights_without_room_and_those_in_panels_stay_codes() -> None:
    short = replace(FP32, most_decoded=MOST_DECODED)

    def chosen(scheme: QuantScheme, how: Arithmetic, *shape: int) -> type:
        facts = LinearFacts((shape[0], shape[1]), scheme, torch.bfloat16, torch.bfloat16)
        return type(choose(table.CODED, facts, how).form)

    assert chosen(G4, FP32, 1024, 1024) == DecodedOnce
    assert chosen(G4, short, 768, 256) == chosen(G4, short, 256, 768) == DecodedOnce
    assert chosen(G4, short, 1024, 1024) == chosen(G4, short, 513, 512) == DecodedTiles
    assert chosen(G4, Arithmetic(torch.float32, torch.device("cuda")), 513, 512) == DecodedTiles
    if native().library is not None:
        assert chosen(PRESETS["W4A16"], FP32, 768, 256) == PanelsForm
    facts = LinearFacts((1024, 1024), G4, torch.bfloat16, torch.bfloat16)
    assert DecodedOnce().why_not(facts, short) == "1024 x 1024 numbers are more than 262144"


@needs_native
def test_16_bits_stay_16_bits() -> None:
    weight = pack_codes(made(G4), facts_of(made(G4), torch.bfloat16), FP32)
    assert weight.nbytes == N * K * 2


def mixed(spec: LinearSpec) -> QuantScheme | None:
    """Of linears that are one product one is dense, one has other groups."""
    return {"k": None, "v": QuantScheme(bits=8, group_size=8)}.get(spec.role, G4)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_says_and_holds_what_is_decoded(dtype: torch.dtype, tmp_path: Path) -> None:
    """With the logits of codes that are decoded in tiles."""
    source = tiny_models.make("llama", tmp_path / "source", dtype="bf16")
    compressed_models.write(source, tmp_path / "out", mixed)
    weights, how = open_weights(Checkpoint.open(tmp_path / "out")), Arithmetic.here(dtype, "cpu")
    told = refusals(weights, how)
    assert len(told) == 2
    if dtype == torch.float32:
        assert told[0] == (
            f"10 linears ({G4.describe()}): codes that are decoded once; not codes in panels"
            " (groups of 4 columns are not 16, 32, 64 or a multiple of 128)"
        )
        numbers = sum(prod(x.shape) for x in weights.spec.linears())
        numbers += prod(weights.spec.embedding_linear().shape)  # the head
        assert weight_bytes(weights, how) == 2 * numbers
    decoder = Decoder.load(weights, dtype=dtype)
    attention = decoder.layers[0].attention
    assert len(attention.qkv.linears) == 1
    work = workload_of(weights, dtype=dtype)
    of_attention = [p for p in work.products if p.shape == attention.qkv.linears[0].weight.shape]
    assert [p.count for p in of_attention] == [2]
    assert of_attention[0].stored == f"decoded {G4.describe()}"
    ids = list(range(3, 40))
    want = Runs(decoder, texts=1, most=64).whole(ids)
    forward = describe_forward(weights.checkpoint.config, weights.spec)
    tiles = Decoder.of(Loader(weights, forward, replace(how, most_decoded=0)))
    assert len(tiles.layers[0].attention.qkv.linears) == 3
    assert torch.equal(Runs(tiles, texts=1, most=64).whole(ids), want)
