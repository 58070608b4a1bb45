"""Float schemes through the data-free pass: what is read in pieces equals what is read whole."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.arch.describe import describe
from compress.checkpoint import Checkpoint
from compress.errors import RecipeError
from compress.methods import fp8, nvfp4
from compress.methods.fp8 import Fp8Config
from compress.methods.nvfp4 import Nvfp4Config
from compress.pipeline import copying, make_plan, run, stream, work
from compress.pipeline.copying import row_ranges
from compress.pipeline.modules import ModulePlan
from compress.quant.scheme import PRESETS, QuantScheme
from compress.quant.tensor import QuantizedTensor
from pipeline_runs import recipe

WEIGHT_ONLY = {"bits": 8, "type": "float"}
BLOCK = {**WEIGHT_ONLY, "granularity": "block", "group_size": 32}
DENSE = {"format": "dense"}


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, QuantizedTensor]:
    """Every quantized tensor that a run stores, by name."""
    kept: dict[str, QuantizedTensor] = {}
    store = stream.store

    def keep(to: work.Work, module: ModulePlan, quantized: QuantizedTensor) -> int:
        kept[module.linear.tensor] = quantized
        return store(to, module, quantized)

    monkeypatch.setattr(stream, "store", keep)
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
    for name, got in stored.items():
        weight = source(model, name)
        weight = weight.t() if family == "gpt2" else weight
        (whole,) = fp8.quantize([weight], given, Fp8Config("mse"), scale_dtype=weight.dtype)
        assert equal(got, whole.quantized), name
        dense = Checkpoint.open(tmp_path / "out").read(name)
        dense = dense.t() if family == "gpt2" else dense
        assert torch.equal(dense, whole.quantized.dequantize(dense.dtype))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_nvfp4_shares_a_divisor_among_what_runtimes_merge(
    family: str, tiny, stored, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(copying, "ROWS_AT_ONCE", 40 * 64)
    model = tiny(family)
    stage = {"method": "nvfp4", "scheme": "NVFP4A16"}
    report = run(recipe(stage, output=DENSE), model, tmp_path / "out")
    checkpoint = Checkpoint.open(model)
    spec = describe(checkpoint.config, checkpoint.shapes)
    sets: dict[tuple[object, ...], list[str]] = {}
    for block in spec.blocks:
        for x in block.linears:
            if x.tensor in stored:
                key = (block.index, x.fused or x.name, x.expert)
                sets.setdefault(key, []).append(x.tensor)
    assert max(map(len, sets.values())) == 3
    for names in sets.values():
        weights = [source(model, name) for name in names]
        together = nvfp4.quantize(
            weights, PRESETS["NVFP4A16"], Nvfp4Config(), scale_dtype=torch.bfloat16
        )
        divisors = torch.cat([stored[name].global_scale for name in names])
        assert divisors.unique().numel() == 1
        for name, outcome in zip(names, together, strict=True):
            assert equal(stored[name], outcome.quantized), name
            assert torch.equal(stored[name].global_scale, outcome.quantized.global_scale)
    layers = [layer for layer in report.stages[0].layers if layer.error is not None]
    assert [layer.name for layer in layers] == [
        x.name for x in spec.linears() if x.tensor in stored
    ]
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


def test_two_stages_cannot_choose_one_divisor(tiny) -> None:
    stage = {"method": "nvfp4", "scheme": "NVFP4A16"}
    q, k = {**stage, "targets": ["q_proj"]}, {**stage, "targets": ["k_proj", "v_proj"]}
    with pytest.raises(RecipeError, match=r"nvfp4 of stages\[0\].*nvfp4 of stages\[1\]"):
        make_plan(recipe(q, k), tiny("llama"))
