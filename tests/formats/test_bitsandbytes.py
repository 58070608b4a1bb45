"""bitsandbytes' 8-bit layout: round trips, what is read with suspicion, what validate finds."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.arch.describe import describe
from compress.arch.spec import DecoderSpec, LinearSpec
from compress.checkpoint import Checkpoint
from compress.checkpoint.shards.dtypes import DTYPE_CODES
from compress.errors import CheckpointError, RecipeError
from compress.formats import FORMATS, Weights, open_weights
from compress.formats.bitsandbytes import codec as bitsandbytes
from compress.formats.runtimes.judge import runtimes
from compress.formats.storage import WeightStorage
from compress.formats.validate import Expected, validate
from compress.methods import METHODS
from compress.methods.llm_int8 import LlmInt8Config
from compress.methods.observed import Observed
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress.quant.tensor import QuantizedTensor
from helpers import tiny_models
from helpers.compressed_models import encoded

DYNAMIC, CALIBRATED = PRESETS["LLM_INT8"], PRESETS["LLM_INT8_CALIBRATED"]
CODEC = FORMATS["bitsandbytes"]
NAME = "model.layers.0.mlp.down_proj.weight"


def rounded(weight: Tensor, scheme: QuantScheme, every: int = 7) -> QuantizedTensor:
    """A weight as the method rounds it; columns 1, 1 + every, ... are outliers."""
    absmax = torch.zeros(weight.shape[1])
    absmax[1::every] = 100.0
    (outcome,) = METHODS["llm_int8"].quantize(
        [weight],
        scheme,
        LlmInt8Config(),
        scale_dtype=weight.dtype,
        observed=Observed(absmax=absmax),
    )
    return outcome.quantized


@dataclass(frozen=True, slots=True)
class Written:
    folder: Path
    source: Checkpoint
    spec: DecoderSpec
    quantized: dict[str, QuantizedTensor]

    def expected(self) -> Expected:
        schemes = {name: q.scheme for name, q in self.quantized.items()}
        return Expected(self.source.tensors, self.spec, schemes, bitsandbytes.NAME)


def all_linears(linear: LinearSpec) -> bool:
    return linear.role not in ("router", "head")


def write(
    source: Path,
    folder: Path,
    scheme: QuantScheme = CALIBRATED,
    choose: Callable[[LinearSpec], bool] = all_linears,
) -> Written:
    checkpoint = Checkpoint.open(source)
    spec = describe(checkpoint.config, checkpoint.shapes)
    tensors, side = load_file(source / "model.safetensors"), {}
    quantized = {}
    for linear in filter(choose, spec.all_linears()):
        weight = tensors.pop(linear.tensor)
        q = rounded(weight.t().contiguous() if linear.transposed else weight, scheme)
        tensors |= encoded(CODEC, linear.tensor, q, transposed=linear.transposed)
        quantized[linear.tensor] = q
        if q.outliers is not None:
            side |= bitsandbytes.encode_outliers(linear.tensor, q.outliers)
    schemes = {name: q.scheme for name, q in quantized.items()}
    block = CODEC.config(spec, checkpoint.shapes, schemes)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    if side:
        (folder / "compress_model").mkdir()
        save_file(side, folder / bitsandbytes.SIDE_FILE)
    (folder / "config.json").write_text(
        json.dumps({**checkpoint.config, "quantization_config": block})
    )
    return Written(folder, checkpoint, spec, quantized)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("llama"), tied=True)


def opened(folder: Path) -> Weights:
    weights = open_weights(Checkpoint.open(folder))
    assert weights.format.coded
    return weights


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= values
    path.write_text(json.dumps(config))


def change_side(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = folder / bitsandbytes.SIDE_FILE
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", [DYNAMIC, CALIBRATED], ids=["dynamic", "calibrated"])
def test_round_trip_is_exact(scheme: QuantScheme, dtype: torch.dtype) -> None:
    weight = torch.randn(300, 37, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[3] = 0
    q = rounded(weight, scheme)
    parts = encoded(CODEC, NAME, q)
    planned = CODEC.layout(WeightStorage(NAME, (300, 37), scheme, DTYPE_CODES[dtype]))
    assert [(x, DTYPE_CODES[t.dtype], tuple(t.shape)) for x, t in parts.items()] == planned
    outliers = None
    if q.outliers is not None:
        side = bitsandbytes.encode_outliers(NAME, q.outliers)
        outliers = bitsandbytes.decode_outliers(
            NAME, (300, 37), side.__contains__, side.__getitem__
        )
    back = bitsandbytes.decode(NAME, scheme, parts.__contains__, parts.__getitem__)
    back = replace(back, outliers=outliers)
    assert torch.equal(back.codes, q.codes)
    assert torch.equal(back.scale, q.scale)
    assert torch.equal(back.dequantize(), q.dequantize())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_weight_comes_back(family: str, tmp_path: Path) -> None:
    written = write(tiny_models.make(family, tmp_path / "source"), tmp_path / "out")
    weights = opened(written.folder)
    assert weights.spec == written.spec
    assert weights.shapes == written.source.shapes
    for linear in written.spec.all_linears():
        q = written.quantized.get(linear.tensor)
        if q is None:
            assert torch.equal(weights.read(linear.tensor), written.source.read(linear.tensor))
            assert weights.activation(linear.name) is None
            continue
        dense = q.dequantize(torch.bfloat16)  # as the source
        assert torch.equal(
            weights.read(linear.tensor), dense.t() if linear.transposed else dense
        ), linear.name
        inputs = weights.activation(linear.name)
        assert inputs is not None
        assert inputs.scheme == CALIBRATED.activation
        assert q.outliers is not None
        assert inputs.columns is not None
        assert torch.equal(inputs.columns, q.outliers.columns)
        assert weights.outlier_columns(linear.name) == q.outliers.columns.numel()
    assert validate(weights.checkpoint, written.expected()) == []


def test_without_the_side_file_it_is_the_dynamic_form(llama: Path, tmp_path: Path) -> None:
    fixed = write(llama, tmp_path / "fixed")
    found = write(llama, tmp_path / "found", DYNAMIC)
    (fixed.folder / bitsandbytes.SIDE_FILE).unlink()
    names = [p.name for p in sorted(found.folder.iterdir())]
    for name in names:
        assert (fixed.folder / name).read_bytes() == (found.folder / name).read_bytes(), name
    weights = opened(fixed.folder)
    linear = next(iter(fixed.quantized)).removesuffix(".weight")
    assert weights.scheme(linear) == DYNAMIC
    inputs = weights.activation(linear)
    assert inputs is not None
    assert inputs.columns is None
    assert inputs.scheme.outliers == "dynamic"


def test_conv1d_of_other_tools_is_known_by_its_family(tmp_path: Path) -> None:
    written = write(tiny_models.make("gpt2", tmp_path / "source"), tmp_path / "out", DYNAMIC)
    path = written.folder / "config.json"
    config = json.loads(path.read_text())
    assert config["quantization_config"].pop("transposed")
    path.write_text(json.dumps(config))
    assert opened(written.folder).spec == written.spec


def test_the_config_is_transformers_own(llama: Path, tmp_path: Path) -> None:
    written = write(llama, tmp_path / "out", choose=lambda x: x.role not in ("head", "o"))
    block = json.loads((written.folder / "config.json").read_text())["quantization_config"]
    skipped = block.pop("llm_int8_skip_modules")
    assert block == {
        "quant_method": "bitsandbytes",
        "load_in_8bit": True,
        "load_in_4bit": False,
        "llm_int8_threshold": 6.0,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
    }
    attention = [f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)]
    assert sorted(skipped) == ["lm_head", *attention]


def test_a_threshold_of_zero_has_no_outliers(llama: Path, tmp_path: Path) -> None:
    written = write(llama, tmp_path / "out", DYNAMIC)
    change_config(written.folder, llm_int8_threshold=0.0)
    weights = opened(written.folder)
    found = {weights.scheme(linear.name) for linear in written.spec.linears()}
    assert found == {replace(DYNAMIC, activation=ActivationScheme())}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"load_in_4bit": True, "load_in_8bit": False}, "4-bit form"),
        ({"llm_int8_threshold": "six"}, "llm_int8_threshold is 'six'"),
        ({"llm_int8_threshold": -1}, "llm_int8_threshold is -1"),
        ({"llm_int8_threshold": True}, "llm_int8_threshold is True"),
        ({"transposed": "all"}, "transposed must be a list"),
        ({"transposed": [1]}, "transposed must be a list"),
    ],
)
def test_malformed_configs(
    llama: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    written = write(llama, tmp_path / "out")
    change_config(written.folder, **values)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_weights(Checkpoint.open(written.folder))
    assert "\n" not in str(caught.value)


COLUMNS, WEIGHT = NAME.replace(".weight", ".columns"), NAME


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(WEIGHT), "lacks tensor .*down_proj.weight"),
        (lambda t: t.pop(COLUMNS), "lacks tensor .*down_proj.columns"),
        (lambda t: t.update({COLUMNS: t[COLUMNS].int()}), "must be int64, ascending"),
        (lambda t: t.update({COLUMNS: t[COLUMNS].flip(0)}), "must be int64, ascending"),
        (lambda t: t.update({COLUMNS: t[COLUMNS] + 90}), "ascending columns of 0 to 95"),
        (lambda t: t.update({COLUMNS: t[COLUMNS] - 2}), "ascending columns of 0 to 95"),
        (lambda t: t.update({WEIGHT: t[WEIGHT][:, 1:].clone()}), r"must be floats \[64, 14\]"),
        (lambda t: t.update({WEIGHT: t[WEIGHT].int()}), r"must be floats \[64, 14\]"),
    ],
)
def test_malformed_side_files(
    llama: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    written = write(llama, tmp_path / "out")
    change_side(written.folder, change)
    with pytest.raises(CheckpointError, match=message):
        opened(written.folder).outliers(NAME)
    assert validate(Checkpoint.open(written.folder), written.expected())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({NAME: t[NAME].float()}), r"float32 \[4, 6\] where .* int8 \[rows"),
        (lambda t: t.update({"SCB": t["SCB"][1:].clone()}), r"\[3\] where .* needs float32 \[4\]"),
        (lambda t: t.update({"SCB": t["SCB"].half()}), r"float16 \[4\] .* needs float32 \[4\]"),
        (lambda t: t["weight_format"].fill_(3), "weight_format is 3; only 0"),
    ],
)
def test_malformed_parts(change: Callable[[dict[str, Tensor]], None], message: str) -> None:
    parts = encoded(CODEC, NAME, rounded(torch.randn(4, 6), DYNAMIC))
    module = NAME.removesuffix(".weight")
    short = {
        name.removeprefix(f"{module}.") if name != NAME else name: t for name, t in parts.items()
    }
    change(short)
    parts = {name if name == NAME else f"{module}.{name}": t for name, t in short.items()}
    with pytest.raises(CheckpointError, match=message):
        bitsandbytes.decode(NAME, DYNAMIC, parts.__contains__, parts.__getitem__)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t[WEIGHT].fill_(float("nan")), "weights of its outlier columns are not finite"),
        (lambda t: t.update({WEIGHT: t[WEIGHT].float()}), "are F32, the source's BF16"),
        (lambda t: t.update({"else.weight": torch.ones(2)}), "tensor else.weight belongs to noth"),
        (lambda t: (t.pop(WEIGHT), t.pop(COLUMNS)), "says int8 sym channel a8 dynamic outliers"),
    ],
)
def test_validate_looks_into_the_side_file(
    llama: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], problem: str
) -> None:
    written = write(llama, tmp_path / "out")
    change_side(written.folder, change)
    assert any(problem in x for x in validate(Checkpoint.open(written.folder), written.expected()))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"llm_int8_skip_modules": []}, "lm_head: quantization_config does not ignore it"),
        ({"llm_int8_threshold": 5.0}, "outliers>=5, stored is int8"),
        (
            {"llm_int8_skip_modules": ["lm_head", NAME.removesuffix(".weight")]},
            "down_proj: quantization_config says not quantized, stored is int8",
        ),
        ({"quant_method": "gptq"}, "names the quantization 'gptq', not 'bitsandbytes'"),
    ],
)
def test_validate_reads_the_config_as_a_loader_would(
    llama: Path, tmp_path: Path, values: dict[str, Any], problem: str
) -> None:
    written = write(llama, tmp_path / "out")
    change_config(written.folder, **values)
    assert any(problem in x for x in validate(Checkpoint.open(written.folder), written.expected()))


def test_what_has_no_place_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"holds LLM.int8\(\) only"):
        CODEC.layout(WeightStorage(NAME, (4, 6), PRESETS["W8A8"], "BF16"))
    with pytest.raises(RecipeError, match="it has no act-order"):
        CODEC.layout(WeightStorage(NAME, (4, 6), DYNAMIC, "BF16", act_order=True))
    with pytest.raises(CheckpointError, match=r"only names that end in '\.weight'"):
        CODEC.layout(WeightStorage("a.kernel", (4, 6), DYNAMIC, "BF16"))
    other = replace(DYNAMIC, activation=ActivationScheme(outliers="dynamic", threshold=8.0))
    assert bitsandbytes.why_not_together([DYNAMIC, other]) == (
        "it has one threshold for all layers, the stages have 6 and 8"
    )
    assert bitsandbytes.why_not_together([DYNAMIC, CALIBRATED]) is None


def test_runtimes(tmp_path: Path) -> None:
    def verdicts(family: str, choose: Callable[[LinearSpec], bool]) -> dict[str, tuple[str, str]]:
        folder = tmp_path / family
        if not folder.exists():
            tiny_models.make(family, folder)
        checkpoint = Checkpoint.open(folder)
        spec = describe(checkpoint.config, checkpoint.shapes)
        schemes = {x.tensor: CALIBRATED for x in filter(choose, spec.all_linears())}
        return {v[0]: (v[1], v[2]) for v in runtimes("bitsandbytes", schemes, spec)}

    usual = verdicts("llama", all_linears)
    assert {name: verdict for name, (verdict, _) in usual.items()} == {
        "vLLM on GPU": "expected",
        "vLLM on CPU": "no",
        "transformers": "yes",
    }
    assert "finds outlier columns itself" in usual["transformers"][1]
    assert verdicts("gpt2", all_linears)["transformers"][0] == "yes"
    assert "Conv1D" in verdicts("gpt2", all_linears)["vLLM on GPU"][1]
    assert "mixtures" in verdicts("mixtral", lambda x: x.role == "o")["vLLM on GPU"][1]
    assert "fused into" in verdicts("llama", lambda x: x.role == "o")["vLLM on GPU"][1]
    assert "output head" in verdicts("llama", lambda x: True)["vLLM on GPU"][1]
    assert verdicts("gpt_neox", all_linears)["transformers"][0] == "yes"
    assert verdicts("granite", all_linears)["transformers"][0] == "unknown"
