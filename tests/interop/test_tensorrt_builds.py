"""Our graphs for TensorRT in the real thing: TensorRT for RTX parses and builds without a GPU."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.formats import open_weights
from compress.quant.scheme import PRESETS, QuantScheme
from compress_exporters.exporter import Options
from compress_exporters.onnx.saving import MODEL
from compress_exporters.table import EXPORTERS
from compress_exporters.tensorrt import attention
from compress_exporters.tensorrt.build_notes import JSON
from compress_exporters.tensorrt.engine import BuiltEngine, Tools
from compress_exporters.tensorrt.lint import rules_operators
from compress_exporters.tensorrt.lint.lint import lint
from helpers import tiny_models
from helpers.exporters.tensorrt_faults import Seed
from helpers.exporters.tensorrt_graphs import G64, WIDE, positive, with_outliers
from helpers.exporters.tensorrt_seeds import SEEDS
from helpers.forward_cases import CASES

pytestmark = pytest.mark.interop

TENSORRT = EXPORTERS["tensorrt"]
ROWS = QuantScheme(granularity="channel", group_size=0)
SCHEMES = {
    "int4": G64,
    "int4, larger groups": PRESETS["W4A16"],
    "int4 in rows": ROWS,
    "int8 in blocks": replace(G64, bits=8),
    "W8A16": PRESETS["W8A16"],
    "W8A8_STATIC": PRESETS["W8A8_STATIC"],
    "FP8": PRESETS["FP8"],
    "FP8_DYNAMIC": PRESETS["FP8_DYNAMIC"],
    "FP8 in squares": replace(PRESETS["FP8_BLOCK"], group_size=64, activation=None),
    "NVFP4": PRESETS["NVFP4A16"],
}
# All in 16 bits; in 32 attention is spelled out in one way for all.
FAMILIES = [
    *((case, "fp16") for case in CASES if "dynamic" not in case),
    *((case, "fp32") for case in ("llama", "gemma2", "gpt2", "mixtral with a window", "qwen3")),
    ("deepseek_v3", "fp32"),
]


@pytest.fixture(scope="module")
def tools(tensorrt_rtx: ModuleType) -> Tools:
    found = Tools.find()
    assert tensorrt_rtx.__version__ in found.name or found.package.title == "TensorRT"
    return found


def exported(model: Path, out: Path, dtype: Any) -> Path:
    out.mkdir()
    source = open_weights(Checkpoint.open(model))
    TENSORRT.plan(source, Options(dtype=dtype)).write(out, lambda *_: None)
    return out


def engine(tools: Tools, folder: Path) -> BuiltEngine:
    profiles = json.loads((folder / JSON).read_text())["profiles"]
    return tools.engine(folder / MODEL, profiles)


@pytest.mark.parametrize(("case", "dtype"), FAMILIES)
def test_all_families_are_built(case: str, dtype: str, tools: Tools, tmp_path: Path) -> None:
    family, options = CASES[case]
    model = tiny_models.make(family, tmp_path / "model", dtype="fp32", **options)
    made = engine(tools, exported(model, tmp_path / "out", dtype))
    assert made.profiles == ("prefill", "decode")
    assert made.size > (tmp_path / "out" / "model.onnx.data").stat().st_size


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("case", SCHEMES)
def test_all_schemes_are_built(case: str, dtype: str, tools: Tools, tmp_path: Path) -> None:
    dense = tiny_models.make("llama", tmp_path / "dense", dtype="fp32", **WIDE)
    model = positive(dense, tmp_path / "model", SCHEMES[case])
    assert engine(tools, exported(model, tmp_path / "out", dtype)).size


def test_fixed_columns_are_built(tools: Tools, tmp_path: Path) -> None:
    model = with_outliers(tiny_models.make("llama", tmp_path / "dense"), tmp_path / "model")
    assert engine(tools, exported(model, tmp_path / "out", "fp16")).size


@pytest.mark.parametrize("size", [4, 8, 12, 16, 20, 24, 80, 256, 264, 512])
def test_heads_of_all_sizes_are_built(size: int, tools: Tools, tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model", dtype="fp32", head_dim=size)
    assert engine(tools, exported(model, tmp_path / "out", "fp16")).size


@pytest.mark.parametrize(
    ("size", "dtype"), [(8, "fp16"), (20, "fp16"), (264, "fp16"), (16, "fp32"), (64, "fp32")]
)
def test_attention_without_a_kernel_is_refused(
    size: int, dtype: str, tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is written as one operator in no other types and sizes than the table's."""
    for where in (attention, rules_operators):
        monkeypatch.setattr(where, "FUSED_HEADS", range(1, 1000))
        monkeypatch.setattr(where, "FUSED_TYPES", ("FLOAT", "FLOAT16"))
    model = tiny_models.make("llama", tmp_path / "model", dtype="fp32", head_dim=size)
    folder = exported(model, tmp_path / "out", dtype)
    with pytest.raises(CheckpointError, match="was not supported by a dedicated kernel"):
        engine(tools, folder)


# Faults of the lint's tests that the real parser or builder finds as well, with a part of its word.
# It takes others, which TensorRT's pages forbid, as scales below 0.
REFUSED = {
    "attention in 32 bits": "must have same input types",
    "a soft cap": "softcap is not supported",
    "is_causal": "Option mask cannot be used together with",
    "a present of attention": "only supports Attention nodes with one output",
    "a shape that is given in": "value should have been set by symbolic execution",
    "an unsupported operator": "MatMulInteger",
    "a turned weight": "is only allowed before DQ",
    "a zero point of weights": "Non-zero zero point is not supported",
    "a wrong axis": "only the quantization axis may be blocked",
    "blocks that do not divide": "must divide into whole blocks",
    "another type than the scale's": "must have same input types",
    "weights cut off": "Failed to import initializer",
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_finds_faults_that_the_lint_finds(name: str, tools: Tools, tmp_path: Path) -> None:
    seed, folder = SEEDS[name], tmp_path / "out"
    exported(_right(seed, tmp_path), folder, "fp16" if seed.graph == "dense" else "fp32")
    model = onnx.load(folder / MODEL, load_external_data=False)
    seed.put(model, folder)
    onnx.save(model, folder / MODEL)
    assert lint(folder / MODEL)
    with pytest.raises(CheckpointError) as refusal:
        engine(tools, folder)
    assert REFUSED[name] in str(refusal.value)
    assert "\n" not in str(refusal.value)


def _right(seed: Seed, place: Path) -> Path:
    """The model of the graph that a fault is put into."""
    if seed.graph == "dense":
        return tiny_models.make("llama", place / "model", dtype="fp32")
    dense = tiny_models.make("llama", place / "dense", dtype="fp32", **WIDE)
    return positive(dense, place / "model", {"int4": G64}[seed.graph])


def test_the_proof_says_what_was_built(tools: Tools, tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model", dtype="fp32")
    folder = exported(model, tmp_path / "out", "fp16")
    source = open_weights(Checkpoint.open(model))
    proof = TENSORRT.plan(source, Options(dtype="fp16")).verify(folder)
    assert proof.detail[1].startswith(f"{tools.name} parses the graph and builds an engine of it (")
    shutil.rmtree(folder)


# What engine.py and engine_steps.py use of the package, also where no device runs it.
USED: dict[str, tuple[str, ...]] = {
    "Builder": (
        *("create_network", "create_builder_config", "create_optimization_profile"),
        "build_serialized_network",
    ),
    "BuilderFlag": ("TF32",),
    "DataType": ("FLOAT", "HALF", "INT64"),
    "IBuilderConfig": ("clear_flag", "add_optimization_profile"),
    "ICudaEngine": (
        *("num_io_tensors", "get_tensor_name", "get_tensor_dtype", "get_tensor_shape"),
        *("get_tensor_mode", "create_execution_context"),
    ),
    "IExecutionContext": (
        *("set_optimization_profile_async", "set_input_shape", "get_tensor_shape"),
        *("set_tensor_address", "execute_async_v3"),
    ),
    "IHostMemory": ("nbytes",),
    "ILogger": ("Severity", "log"),
    "IOptimizationProfile": ("set_shape",),
    "NetworkDefinitionCreationFlag": ("STRONGLY_TYPED",),
    "OnnxParser": ("parse_from_file", "num_errors", "get_error"),
    "ParserError": ("node", "node_name", "node_operator", "desc"),
    "Runtime": ("deserialize_cuda_engine",),
    "TensorIOMode": ("INPUT",),
}


@pytest.mark.parametrize("kind", USED)
def test_the_package_has_what_is_used(kind: str, tensorrt_rtx: ModuleType) -> None:
    assert not [name for name in USED[kind] if not hasattr(getattr(tensorrt_rtx, kind), name)]
