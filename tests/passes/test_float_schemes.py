"""Float schemes through the data-free pass: what is read in pieces equals what is read whole."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.arch.describe import describe
from compress.checkpoint import Checkpoint
from compress.errors import RecipeError
from compress.methods import METHODS, fp8
from compress.methods.fp8 import Fp8Config
from compress.passes import context, copying
from compress.passes.copying import row_ranges
from compress.passes.quantize import solve, stream
from compress.plan.layers import ModulePlan
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor
from compress.verbs import make_plan, run
from helpers.short_runs import recipe, text_source

WEIGHT_ONLY = {"bits": 8, "type": "float"}
BLOCK = {**WEIGHT_ONLY, "granularity": "block", "group_size": 32}
DENSE = {"format": "dense"}


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, QuantizedTensor]:
    """Every quantized tensor that a run stores, by name."""
    kept: dict[str, QuantizedTensor] = {}
    store = context.store

    def keep(to: context.PassContext, module: ModulePlan, quantized: QuantizedTensor) -> int:
        kept[module.linear.tensor] = quantized
        return store(to, module, quantized)

    for module in (stream, solve):
        monkeypatch.setattr(module, "store", keep)
    return kept


def source(model: Path, tensor: str) -> Tensor:
    return Checkpoint.open(model).read(tensor)


def equal(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return torch.equal(a.scale.float(), b.scale.float()) and torch.equal(
        a.codes.float(), b.codes.float()
    )


@pytest.mark.parametrize(
    "scheme",
    [BLOCK, {**WEIGHT_ONLY, "granularity": "tensor"}, {**WEIGHT_ONLY, "granularity": "channel"}],
    ids=["block", "tensor", "channel"],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_fp8_in_pieces_equals_fp8_of_the_whole(
    family: str, scheme: dict[str, object], tiny, stored, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(copying, "ROWS_AT_ONCE", 40 * 64)  # 40 rows of 64: no multiple of a block
    model = tiny(family)
    stage = {"method": "fp8", "scheme": scheme, "scale_search": "mse"}
    run(recipe(stage, output=DENSE), model, tmp_path / "out")
    assert stored
    given = QuantScheme(**{"granularity": "channel", "group_size": 0, **scheme})
    for names in merged_sets(model, stored) if given.granularity == "tensor" else zip(stored):
        weights = [source(model, name) for name in names]
        weights = [weight.t() if family == "gpt2" else weight for weight in weights]
        whole = fp8.quantize(weights, given, Fp8Config("mse"), scale_dtype=torch.bfloat16)
        for name, outcome in zip(names, whole, strict=True):
            assert equal(stored[name], outcome.quantized), name
            dense = Checkpoint.open(tmp_path / "out").read(name)
            dense = dense.t() if family == "gpt2" else dense
            assert torch.equal(dense, outcome.quantized.dequantize(dense.dtype))


def merged_sets(model: Path, stored: Mapping[str, QuantizedTensor]) -> list[list[str]]:
    """Tensors that runtimes merge, together; the others each by itself."""
    checkpoint = Checkpoint.open(model)
    sets: dict[tuple[object, ...], list[str]] = {}
    for block in describe(checkpoint.config, checkpoint.shapes).blocks:
        for x in (x for x in block.linears if x.tensor in stored):
            sets.setdefault((block.index, x.fused or x.name, x.expert), []).append(x.tensor)
    return list(sets.values())


FP8_TENSOR = {"method": "fp8", "scheme": {**WEIGHT_ONLY, "granularity": "tensor"}}
SHARING: dict[str, dict[str, Any]] = {
    "nvfp4": {"method": "nvfp4", "scheme": "NVFP4A16"},
    "nvfp4 calibrated": {
        "method": "nvfp4",
        "scheme": "NVFP4A16",
        "scale_search": "importance",
    },
    "fp8": FP8_TENSOR,
    "fp8 static": {"method": "fp8", "scheme": "FP8"},
    "awq": {**FP8_TENSOR, "method": "awq", "grid": 2},
}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("stage", SHARING.values(), ids=SHARING.keys())
def test_what_runtimes_merge_shares_the_number_of_its_scheme(
    family: str, stage: dict[str, Any], tiny, stored, tmp_path: Path, monkeypatch
) -> None:
    """And shares it with nothing else: every expert has its own."""
    monkeypatch.setattr(copying, "ROWS_AT_ONCE", 40 * 64)
    data_free = stage in (SHARING["nvfp4"], SHARING["fp8"])
    data = {} if data_free else {"calibration": text_source(tmp_path)}
    report = run(recipe(stage, output=DENSE, **data), tiny(family), tmp_path / "out")
    sets = merged_sets(tiny(family), stored)
    assert {len(names) for names in sets} == {1, 2, 3}
    for names in sets:
        parts = [stored[name] for name in names]
        numbers = [q.scale if q.global_scale is None else q.global_scale for q in parts]
        assert torch.cat(numbers).unique().numel() == 1, names
        if stage is SHARING["awq"]:  # which has scaled the weights before
            continue
        weights = [source(tiny(family), name) for name in names]
        if data_free:
            method, scheme = METHODS[stage["method"]], parts[0].scheme
            whole = method.quantize(weights, scheme, method.config(), scale_dtype=torch.bfloat16)
            assert all(equal(x.quantized, q) for x, q in zip(whole, parts, strict=True)), names
        largest = max(float(weight.abs().max()) for weight in weights)
        number = float(numbers[0])
        expected = 448 * 6 / largest if parts[0].global_scale is not None else largest / 448
        assert number == pytest.approx(expected, rel=2**-8), names
    layers = [layer for layer in report.layers if layer.error is not None]
    assert len(layers) == len(stored)
    assert all(0 < layer.error < 0.02 for layer in layers)


def test_runs_of_rows_keep_to_multiples() -> None:
    assert row_ranges((10, 1 << 24), 4) == [(0, 4), (4, 8), (8, 10)]
    assert row_ranges((10, 1 << 26), 4) == [(0, 4), (4, 8), (8, 10)]  # a multiple is the least
    assert row_ranges((10, 1 << 26), 10) == [(0, 10)]
    assert row_ranges((10, 1 << 25)) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]


@pytest.mark.parametrize(
    ("stage", "size"),
    [
        ({"method": "nvfp4", "scheme": "NVFP4A16"}, 16),
        ({"method": "fp8", "scheme": BLOCK}, 32),
        (
            {
                "method": "fp8",
                "scheme": {
                    **WEIGHT_ONLY,
                    "granularity": "channel",
                    "activation": {"type": "float", "granularity": "group", "group_size": 64},
                },
            },
            64,
        ),
    ],
)
def test_a_width_that_groups_cut_is_refused(stage: dict[str, object], size: int, tiny) -> None:
    model = tiny("llama", intermediate_size=88)
    ignore = {"ignore": ["lm_head", "gate_proj", "up_proj"]}
    with pytest.raises(RecipeError, match=rf"88 input columns, not a multiple of {size}.*FP8_DYN"):
        make_plan(recipe({**stage, **ignore}, output=DENSE), model)


@pytest.mark.parametrize("name", ["nvfp4", "fp8"])
def test_two_stages_cannot_choose_one_number(name: str, tiny) -> None:
    q, k = deepcopy(SHARING[name]), deepcopy(SHARING[name])
    q["targets"], k["targets"] = ["q_proj"], ["k_proj", "v_proj"]
    with pytest.raises(RecipeError, match=r" of stages\[0\].* of stages\[1\]; runtimes merge"):
        make_plan(recipe(q, k, output=DENSE), tiny("llama"))
