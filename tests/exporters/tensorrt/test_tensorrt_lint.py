"""TensorRT's lint: clean on graphs that are right, and every rule finds the faults it is for."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from compress.errors import CheckpointError
from compress.quant.scheme import PRESETS
from compress_exporters.exporter import Options
from compress_exporters.onnx.graph.canonical import CANONICAL
from compress_exporters.onnx.saving import MODEL, save
from compress_exporters.tensorrt.lint.lint import RULES, lint, require_clean
from compress_exporters.tensorrt.lint.operators import OPERATORS, UNSUPPORTED
from compress_exporters.tensorrt.lowering import TENSORRT
from helpers import tiny_models
from helpers.exporters.onnx_graphs import built
from helpers.exporters.tensorrt_graphs import G64, WIDE, positive
from helpers.exporters.tensorrt_seeds import SEEDS
from helpers.forward_cases import HEADS

SCHEMES = {
    "int4": G64,
    "int8": PRESETS["W8A8"],
    "w8a8": PRESETS["W8A8_STATIC"],
    "nvfp4": PRESETS["NVFP4A16"],
}
# Attention is one operator in 16 bits only.
FAMILIES = {
    "dense": ("llama", Options(dtype="fp16")),
    "spelled": ("llama", Options()),
    "experts": ("mixtral", Options()),
    "capped": ("gemma2", Options()),
}


def written(model: Path, out: Path, options: Options | None = None) -> Path:
    out.mkdir()
    save(built(model, options, TENSORRT), out, lambda *_: None)
    return out


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a graph that is right, by its name; written once."""
    place = tmp_path_factory.mktemp("graphs")

    def get(name: str) -> Path:
        if (place / name).is_dir():
            return place / name
        options = None
        if name in FAMILIES:
            family, options = FAMILIES[name]
            model = tiny_models.make(family, place / f"{name}.model", dtype="fp32")
        else:
            wide = place / "wide"
            if not wide.is_dir():
                tiny_models.make("llama", wide, dtype="fp32", **WIDE)
            model = positive(wide, place / f"{name}.model", SCHEMES[name])
        return written(model, place / name, options)

    return get


@pytest.mark.parametrize("name", [*FAMILIES, *SCHEMES])
def test_right_graphs_are_clean(name: str, graph: Callable[[str], Path]) -> None:
    assert lint(graph(name) / MODEL) == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_is_found(seed: str, graph: Callable[[str], Path], tmp_path: Path) -> None:
    wanted = SEEDS[seed]
    folder = tmp_path / "out"
    shutil.copytree(graph(wanted.graph), folder)
    model = onnx.load(folder / MODEL, load_external_data=False)
    wanted.put(model, folder)
    onnx.save(model, folder / MODEL)
    found = [str(finding) for rule, finding in lint(folder / MODEL) if rule == wanted.rule]
    assert any(wanted.says in text for text in found), found


def test_every_rule_has_a_fault_and_is_documented() -> None:
    assert {seed.rule for seed in SEEDS.values()} == set(RULES)
    told = (Path(__file__).parents[3] / "docs" / "export.md").read_text()
    rows = [line.split("`")[1] for line in told.splitlines() if line.startswith("| `")]
    assert rows[rows.index("opset") :][: len(RULES)] == list(RULES)


# Each in one type, in turns; in the other in the long set.
TYPED = [
    pytest.param(case, dtype, id=f"{dtype}-{case}",
                 marks=() if (place + turn) % 2 == 0 else pytest.mark.long)
    for place, case in enumerate(x for x in HEADS if "dynamic" not in x)
    for turn, dtype in enumerate(("fp16", "fp32"))
]  # fmt: skip


@pytest.mark.parametrize(("case", "dtype"), TYPED)
def test_graphs_of_all_families_are_clean(case: str, dtype: Any, tmp_path: Path) -> None:
    family, options = HEADS[case]
    model = tiny_models.make(family, tmp_path / "model", dtype="fp32", **options)
    assert lint(written(model, tmp_path / "out", Options(dtype=dtype)) / MODEL) == ()


@pytest.mark.parametrize("size", [6, 8, 12, 16, 20, 256, 264])
def test_attention_is_one_operator_where_a_kernel_does_it(size: int, tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path / "model", dtype="fp32", head_dim=size)
    graph = built(model, Options(dtype="fp16"), TENSORRT)
    kernel = size in (16, 256)
    assert graph.fused("Attention") == ({"Attention": 2} if kernel else {})
    why = "TensorRT's is for heads of 16 to 256, in steps of 8, so it is spelled out"
    assert graph.unfused == ({} if kernel else {"Attention": why})
    out = tmp_path / "out"
    out.mkdir()
    save(graph, out, lambda *_: None)
    assert lint(out / MODEL) == ()


def test_the_plain_graph_is_not_for_tensorrt(tmp_path: Path) -> None:
    model, out = tiny_models.make("llama", tmp_path / "model", dtype="fp32"), tmp_path / "out"
    out.mkdir()
    save(built(model, None, CANONICAL), out, lambda *_: None)
    with pytest.raises(
        CheckpointError,
        match=r"TensorRT 10.15 would not parse it: rule restriction, .*Attention: .*more\)$",
    ):
        require_clean(out / MODEL)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / MODEL).write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match=r"model.onnx is no ONNX model: "):
        lint(tmp_path / MODEL)


def test_an_operator_is_in_one_table() -> None:
    assert not set(OPERATORS) & set(UNSUPPORTED)
