"""Exports for other runtimes: one folder that appears when it is whole, and a report of it."""

import json
from collections import Counter
from pathlib import Path

import pytest

from compress.checkpoint.output import publishing
from compress.cli.main import main
from compress.errors import CheckpointError, OutputError, RecipeError
from compress.verbs import ArtifactTarget, dry_artifact, export_artifact
from compress_exporters.exporter import Options
from helpers import tiny_models
from helpers.pages.copied import blocks_to_copy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("artifact") / "model", tied=True)


def test_a_folder_with_its_report(model: Path, tmp_path: Path) -> None:
    stages = Counter[str]()
    report = export_artifact(
        model,
        ArtifactTarget("onnx"),
        tmp_path / "out",
        progress=lambda event: stages.update([event.stage]),
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        *report.result["files"],
        "report",
        "README.md",
    }
    assert json.loads((out / "report" / "report.json").read_text()) == json.loads(
        json.dumps(report.to_json())
    )
    (row,) = report.exports
    assert (row.target, row.path, row.proof) == ("onnx", str(out), "tokens")
    assert row.max_logit_error is not None
    assert row.max_logit_error < 1e-5
    assert list(row.files) == report.result["files"]
    assert row.bytes == sum((out / name).stat().st_size for name in row.files)
    assert (row.notes, row.fused, row.unfused, row.detail) == (
        report.notes,
        report.fused,
        report.unfused,
        report.detail,
    )
    assert row.fused["Attention"] == 2
    assert {"compress-model", "torch", "onnx", "onnxruntime"} <= set(report.versions)
    assert set(report.seconds) == {"write", "verify"}
    assert stages["export"] > 2
    card = (out / "README.md").read_text()
    assert "# model for onnx" in card
    assert "from a checkpoint with unquantized weights:\n" in card
    assert "proved   logits and greedy tokens" in (out / "report" / "report.md").read_text()
    page = out / "report" / "report.html"
    assert blocks_to_copy(page) == list(row.open_with)
    assert len(row.open_with) == 2
    assert "16 greedy tokens are the same" in page.read_text()


def test_an_export_that_is_not_verified_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(model), "--to", "ONNX", "-o", str(out), "--no-verify"]) == 0
    told = capsys.readouterr().out
    assert "  proved   not verified\n" in told
    assert "to verify" not in told
    assert json.loads((out / "report" / "report.json").read_text())["exports"][0]["proof"] == "none"


def test_options_reach_the_target(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["export", str(model), "--to", "onnx", "--dry-run", "--json"]
    sizes = []
    for more in ([], ["--dtype", "fp16"], ["--max-context", "16"]):
        assert main([*asked, *more]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["result"]["bytes"])
    assert sizes[0] > 1.9 * sizes[1]
    assert sizes[0] - sizes[2] == 2 * (128 - 16) * 8 * 4


def test_options_of_the_other_kind_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for to, option, those in (
        ("onnx", ["--shard-size", "1GB"], "formats"),
        ("onnx", ["--round-scales"], "formats and gguf"),
        ("onnx", ["--accuracy-level", "0"], "onnx-genai"),
        ("gptq", ["--accuracy-level", "0"], "other runtimes"),
        ("gptq", ["--dtype", "fp16"], "other runtimes"),
        ("gptq", ["--max-context", "9"], "other runtimes"),
        ("gptq", ["--no-verify"], "other runtimes"),
    ):
        assert main(["export", str(model), "--to", to, "--dry-run", *option]) == 2
        assert f"{option[0]} is for {those}, and --to is {to}" in capsys.readouterr().err


def test_options_of_a_target_that_is_spelled_in_another_way(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["export", str(model), "--to", "ONNX_GenAI", "--dry-run", "--json"]
    assert main([*asked, "--accuracy-level", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["target"] == "onnx-genai"


def test_a_failed_proof_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress_exporters.onnx.proof.checks.LIMITS", {"fp32": 0.0})
    with pytest.raises(CheckpointError, match="the graph's logits are not those of the weights"):
        export_artifact(model, ArtifactTarget("onnx"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_earlier_results_stay_unless_they_may_go(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for attempt in (dry_artifact, export_artifact):
        with pytest.raises(OutputError, match="no result of an earlier run"):
            attempt(model, ArtifactTarget("onnx"), tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "mine").exists()


def test_an_artifact_is_replaced_where_that_is_asked(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_artifact(model, ArtifactTarget("onnx"), out, verify=False)
    with pytest.raises(OutputError, match="add --overwrite"):
        export_artifact(model, ArtifactTarget("onnx"), out, verify=False)
    export_artifact(
        model, ArtifactTarget("onnx", Options("fp16")), out, verify=False, overwrite=True
    )
    data = out / "model.onnx.data"
    size = data.stat().st_size
    data.unlink()
    with pytest.raises(OutputError, match="no result of an earlier run"):
        export_artifact(model, ArtifactTarget("onnx"), out, verify=False, overwrite=True)
    data.touch()
    export_artifact(model, ArtifactTarget("onnx"), out, verify=False, overwrite=True)
    assert data.stat().st_size > 1.9 * size


def test_too_little_disk_is_said_before_writing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "free_bytes", lambda folder: 1000)
    for attempt in (dry_artifact, export_artifact):
        with pytest.raises(OutputError, match=r" are needed, 1.00 kB are free; make room"):
            attempt(model, ArtifactTarget("onnx"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("compress_exporters.onnx.saving.ir.save", full)
    with pytest.raises(OutputError, match="No space left on device; make room"):
        export_artifact(model, ArtifactTarget("onnx"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("positions", [0, -3])
def test_a_context_of_nothing_is_refused(model: Path, positions: int) -> None:
    with pytest.raises(RecipeError, match=f"^--max-context is {positions}; it is 1 position or mo"):
        dry_artifact(model, ArtifactTarget("onnx", Options(max_context=positions)))


def test_no_folder_is_refused(model: Path) -> None:
    with pytest.raises(OutputError, match=r"^the artifact has no folder; give `out`, or Options"):
        export_artifact(model, ArtifactTarget("onnx"))
