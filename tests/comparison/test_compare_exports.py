"""Exports as finished results: measured anew where they can be opened, else refused in a line."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.artifacts.export import export_artifact
from compress.artifacts.plan import ArtifactTarget
from compress.comparison import compare as comparing
from compress.comparison.results import read_finished
from compress.errors import RequestError
from compress.verbs import CompareOptions, RunOptions, compare, run
from compress_exporters.exporter import Options
from helpers.short_runs import RTN, WORDS, recipe
from helpers.tiny_models import make


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("source"), dtype="bf16")


def exported(source: Path, out: Path, to: str, **options: Any) -> Path:
    pytest.importorskip("gguf")
    target = ArtifactTarget(to, Options(**options))
    export_artifact(source, target, out, verify=False)
    return out


@pytest.fixture
def in_fp32(source: Path, tmp_path: Path) -> Path:
    """A file of the source's own numbers."""
    return exported(source, tmp_path / "exact", "gguf", dtype="fp32")


def test_an_export_is_measured_beside_a_run(
    source: Path, in_fp32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "predicted_speeds", lambda *_: ([None] * 4, "not asked"))
    run(recipe(RTN), source, tmp_path / "run", options=RunOptions(cache=False))
    rounded = exported(source, tmp_path / "rounded", "gguf", type="Q4_0")
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 20)
    results = [tmp_path / "run", in_fp32, rounded]
    found = compare(results, tmp_path / "out", asked=CompareOptions(text=str(text)))
    each = {x.name: x for x in found.contenders}
    assert each["exact"].kl == 0.0
    assert each["rounded"].kl > 0.0
    for name in ("exact", "rounded"):
        file = tmp_path / name / "model.gguf"
        assert each[name].bytes == file.stat().st_size
        assert each[name].file == "gguf"
    assert any("Q4_0" in line for line in each["rounded"].notes)


def refused(folder: Path) -> str:
    with pytest.raises(RequestError) as raised:
        read_finished(folder)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_only_its_runtime_opens(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    folder = exported(source, tmp_path / "graph", "onnx")
    said = refused(folder)
    assert said.startswith(f"{folder} holds an export to onnx, which is not opened here")
    assert said.endswith(
        f"give the checkpoint that it was made of, {source}, or an export that `eval` opens"
    )


def test_a_source_that_is_gone_or_another(in_fp32: Path) -> None:
    page = in_fp32 / "report" / "report.json"
    told = json.loads(page.read_bytes())
    path = told["source"]["path"]
    told["source"]["bytes"] += 1
    page.write_text(json.dumps(told))
    assert refused(in_fp32) == (
        f"{in_fp32} holds an export, whose source {path} has changed since; export it anew"
    )
    told["source"]["path"] = "/gone"
    page.write_text(json.dumps(told))
    assert refused(in_fp32).startswith(
        f"{in_fp32} holds an export, whose source cannot be read to measure it: "
    )
