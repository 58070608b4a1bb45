"""Codes in panels: the checkpoint's numbers in its bytes, products as the math says, who has it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.errors import RequestError
from compress.formats import open_weights
from compress.quant.scheme import PRESETS, QuantScheme
from compress.quant.tensor import QuantizedTensor
from compress.runtime.decoder.linear import facts_of as linear_facts
from compress.runtime.forms.form import Arithmetic, LinearFacts
from compress.runtime.forms.packed import DecodedTiles, PackedWeight
from compress.runtime.forms.panels import PackedPanels, PanelsForm
from compress.runtime.loading.math import settled_math
from compress.serve.open_model import open_model
from compress_kernels.cpu.library import native
from compress_kernels.ops.linear import linear
from compress_kernels.panels import Math
from helpers import compressed_models, tiny_models
from helpers.engine.flat_runs import Runs, load

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)
CPU = torch.device("cpu")
N, K = 200, 256
MATHS: tuple[Math, ...] = ("exact", "int16", "int8")
G32 = QuantScheme(bits=4, group_size=32)
SCHEMES: Mapping[str, QuantScheme] = {
    **{name: PRESETS[name] for name in ("W2A16", "W3A16", "W4A16", "W4A16_ASYM", "W6A16")},
    **{name: PRESETS[name] for name in ("W8A16", "W8A16_ASYM")},
    "int4 g32": G32,
    "int3 in channels": QuantScheme(bits=3, granularity="channel", group_size=0),
    "int8 for the tensor": QuantScheme(bits=8, granularity="tensor", group_size=0),
}


def rounded(
    scheme: QuantScheme, columns: int = K, rows: int = N, *, act_order: bool = False
) -> QuantizedTensor:
    seed = torch.Generator().manual_seed(rows)
    weight = (torch.randn(rows, columns, generator=seed) * 0.05).bfloat16()
    return compressed_models.round_weight(weight, scheme, act_order=act_order)


def facts_of(tensor: QuantizedTensor) -> LinearFacts:
    return LinearFacts(tensor.shape, tensor.scheme, tensor.scale.dtype, torch.bfloat16)


def packed(tensor: QuantizedTensor, math: Math) -> PackedPanels:
    how = Arithmetic(torch.float32, CPU, math=math)
    assert PanelsForm().why_not(facts_of(tensor), how) is None
    weight = PanelsForm().pack(tensor, facts_of(tensor), how)
    assert isinstance(weight, PackedPanels)
    return weight


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("name", SCHEMES)
def test_the_weight_comes_back_and_exact_multiplies_with_it(name: str, math: Math) -> None:
    tensor = rounded(SCHEMES[name])
    weight = packed(tensor, math)
    values = tensor.dequantize(torch.bfloat16).float()
    assert torch.equal(weight.dequantize(slice(0, N), torch.float32), values)
    assert torch.equal(weight.part(slice(32, 77)).codes, tensor.codes[32:77])
    x, bias = torch.randn(17, K), torch.randn(N)
    found, wanted = weight.matmul(x, None, bias), linear(x, values, bias)
    if math == "exact":
        assert torch.equal(found, wanted)
    else:
        assert (found - wanted).norm() < {"int16": 3e-3, "int8": 2e-2}[math] * wanted.norm()


@pytest.mark.parametrize("name", ["W4A16_ASYM", "W8A16", "NVFP4A16", "FP8_BLOCK"])
def test_fp16_has_the_sums_of_fp32_rounded_once(name: str) -> None:
    """So one token and many have the same bits, and nothing is decoded."""
    tensor, how = rounded({**SCHEMES, **PRESETS}[name]), Arithmetic(torch.float16, CPU)
    facts = facts_of(tensor)
    assert PanelsForm().why_not(facts, how) is None
    weight = PanelsForm().pack(tensor, facts, how)
    assert weight.nbytes == packed(tensor, "exact").nbytes
    x, bias = torch.randn(17, K).half(), torch.randn(N).half()
    found = weight.matmul(x, None, bias)
    values = tensor.dequantize(torch.bfloat16).float()
    assert torch.equal(found, linear(x.float(), values, bias.float()).half())
    assert torch.equal(found, torch.cat([weight.matmul(row, None, bias) for row in x[:, None]]))


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("columns", [K, 250])
def test_bytes_are_told_before(columns: int, math: Math) -> None:
    for scheme in SCHEMES.values():
        tensor = rounded(scheme, columns)
        how = Arithmetic(torch.float32, CPU, math=math)
        weight = packed(tensor, math)
        if scheme.granularity != "tensor":  # that has one scale in the file, and here a row
            assert weight.nbytes == PanelsForm().nbytes(facts_of(tensor), how)


@pytest.mark.parametrize("name", ["W2A16", "W4A16", "W4A16_ASYM", "W8A16"])
def test_panels_take_the_bytes_of_the_codes(name: str) -> None:
    tensor = rounded(SCHEMES[name], 512, 64)
    for math in MATHS:
        assert packed(tensor, math).nbytes <= 1.03 * PackedWeight.of(tensor, CPU).nbytes


@pytest.mark.parametrize("math", MATHS)
def test_columns_in_act_order(math: Math) -> None:
    tensor = rounded(replace(G32, symmetric=False), act_order=True)
    assert tensor.g_idx is not None
    weight, values = packed(tensor, math), tensor.dequantize(torch.bfloat16).float()
    assert torch.equal(weight.dequantize(slice(0, N), torch.float32), values)
    x = torch.randn(5, K)
    found, wanted = weight.matmul(x, None, None), linear(x, values)
    assert torch.equal(found, wanted) == (math == "exact")
    assert (found - wanted).norm() < 2e-2 * wanted.norm()


def test_what_no_panel_says_is_decoded() -> None:
    uneven = replace(rounded(G32), g_idx=torch.zeros(K, dtype=torch.int32))
    how = Arithmetic(torch.float32, CPU, math="int16")
    weight = PanelsForm().pack(uneven, facts_of(uneven), how)
    assert isinstance(weight, PackedWeight)
    wanted = uneven.dequantize(torch.bfloat16).float()
    assert torch.equal(weight.dequantize(slice(0, N), torch.float32), wanted)


@pytest.mark.parametrize(
    ("scheme", "how", "reason"),
    [
        (G32, Arithmetic(torch.float32, torch.device("cuda")), "they are for the CPU"),
        (G32, Arithmetic(torch.float16, CPU, math="int8"), "they are for dtype fp32"),
        (G32, Arithmetic(torch.bfloat16, CPU, math="int16"), "they are for dtype fp32"),
        (replace(G32, group_size=20), Arithmetic(torch.float32, CPU), "groups of 20 columns"),
        (PRESETS["LLM_INT8_CALIBRATED"], Arithmetic(torch.float32, CPU), "outlier columns stand"),
        (PRESETS["LLM_INT8_CALIBRATED"], Arithmetic(torch.float16, CPU), "outlier columns stand"),
    ],
)
def test_what_is_refused(scheme: QuantScheme, how: Arithmetic, reason: str) -> None:
    facts = LinearFacts((N, K), scheme, torch.bfloat16, torch.bfloat16)
    refused = PanelsForm().why_not(facts, how)
    assert refused is not None
    assert reason in refused
    assert DecodedTiles().why_not(facts, how) is None


def test_factors_of_inputs_are_known_before_a_weight_is_read(tmp_path: Path) -> None:
    """Or such linears would be said to round their inputs, and be decoded."""
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp32")
    compressed_models.write(source, tmp_path / "out", G32, fmt="modelopt")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.down_proj"
    tensors[f"{name}.pre_quant_scale"] = torch.full((96,), 2.0)
    save_file(tensors, path, metadata={"format": "pt"})
    weights = open_weights(Checkpoint.open(tmp_path / "out"))
    how, form = Arithmetic(torch.float32, CPU, math="int16"), PanelsForm()
    found = {x.name: form.why_not(linear_facts(weights, x), how) for x in weights.spec.linears()}
    assert found.pop(name) == "inputs are multiplied by factors first"
    assert set(found.values()) == {None}


@pytest.mark.parametrize("math", MATHS)
def test_joined_weights_give_the_same_numbers(math: Math) -> None:
    parts = [packed(rounded(G32, rows=n), math) for n in (48, 24, 24)]
    whole = parts[0].joined((parts[1], parts[2]))
    assert whole is not None
    x = torch.randn(3, K)
    apart = torch.cat([part.matmul(x, None, None) for part in parts], 1)
    assert torch.equal(whole.matmul(x, None, None), apart)
    assert parts[0].joined((packed(rounded(PRESETS["W4A16"]), math),)) is None
    assert parts[0].joined((PackedWeight.of(rounded(G32), CPU),)) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("panels")
    source = tiny_models.make("llama", root / "source", dtype="bf16")
    compressed_models.write(source, root / "out", G32)
    return root / "out"


def test_math_is_settled_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded = open_weights(Checkpoint.open(folder))
    dense = open_weights(Checkpoint.open(folder.parent / "source"))
    monkeypatch.setattr(Checkpoint, "read", None)
    fp32, bf16 = torch.float32, torch.bfloat16
    assert settled_math(coded, None, fp32, "cpu") == "int16"
    assert settled_math(coded, "int8", fp32, "cpu") == "int8"
    assert settled_math(coded, "exact", bf16, "cpu") == "exact"
    assert settled_math(coded, None, bf16, "cpu") == "exact"
    assert settled_math(dense, None, fp32, "cpu") == "exact"
    with pytest.raises(RequestError, match="has no products for it: they are for dtype fp32;"):
        settled_math(coded, "int8", bf16, "cpu")
    with pytest.raises(RequestError, match="its weights are not stored as codes; leave math out"):
        settled_math(dense, "int8", fp32, "cpu")
    with pytest.raises(RequestError, match="math is 'int4'; it is one of exact, int16, int8"):
        settled_math(coded, "int4", fp32, "cpu")  # type: ignore[arg-type]


def test_what_8_bit_floats_are_multiplied_by_is_said(folder: Path, tmp_path: Path) -> None:
    """Weights alone are no codes that another math than exact reads."""
    source, both, alone = folder.parent / "source", tmp_path / "both", tmp_path / "alone"
    fp8 = PRESETS["FP8_DYNAMIC"]
    compressed_models.write(source, both, fp8)
    compressed_models.write(source, alone, replace(fp8, activation=None))
    (said,) = open_model(both).notices
    assert said == (
        "math int16: 14 linears sum products of 8-bit floats, inputs rounded as their scheme says;"
        " exact rounds decoded weights, too"
    )
    assert open_model(alone).notices == ()
    with pytest.raises(RequestError) as error:
        open_model(alone, math="int8")
    assert str(error.value) == (
        f"math is int8, and {alone} has no products for it: weights and rounded inputs are neither"
        " whole numbers nor both of them 8-bit floats; leave math out, or take exact"
    )


def test_a_model_names_its_math(folder: Path) -> None:
    model = open_model(folder)
    assert model.math == "int16"
    assert any(
        "math int16: inputs of 14 linears are rounded to 16 bits" in x for x in model.notices
    )
    assert {x.math for x in model.score("once upon", [" a time", " the cat"])} == {"int16"}
    exact = open_model(folder, math="exact")
    assert not any("math" in line for line in exact.notices)
    assert {x.math for x in exact.score("once upon", [" a time"])} == {"exact"}


def log_probabilities(folder: Path, ids: list[int], math: Math) -> Tensor:
    runs = Runs(load(folder, math=math), texts=1, most=len(ids))
    return torch.log_softmax(runs.whole(ids).double(), -1)


def widened(source: Path, folder: Path) -> Path:
    """The same model in fp32, so that decoded weights are rounded to nothing more."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    save_file({name: x.float() for name, x in tensors.items()}, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "wide", "of_int8"),
    [
        ("tale-6m", False, (0.0, 2e-2)),
        ("tale-6m", True, (0.0, 2e-2)),
        ("tale-6m-outliers", True, (0.1, 10.0)),
    ],
)
def test_rounding_to_16_bits_costs_less_than_bf16_inputs(
    name: str, wide: bool, of_int8: tuple[float, float], shared_dir: Path, tmp_path: Path
) -> None:
    """KL to exact; what inputs in bf16 cost is 3e-5. Large outliers leave int8 nothing."""
    source = shared_dir / "models" / name
    source = widened(source, tmp_path / "wide") if wide else source
    compressed_models.write(source, tmp_path / "out", PRESETS["W4A16"])
    seed = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 2000, (96,), generator=seed).tolist()
    exact = log_probabilities(tmp_path / "out", ids, "exact")
    cases: tuple[tuple[Math, tuple[float, float]], ...] = (
        ("int16", (0.0, 5e-5)),
        ("int8", of_int8),
    )
    for math, (least, most) in cases:
        other = log_probabilities(tmp_path / "out", ids, math)
        assert least < float((exact.exp() * (exact - other)).sum(-1).mean()) < most
