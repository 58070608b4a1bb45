"""`roofline` and `bench` on the command line: tables, JSON, mistakes in one line."""

import json
from pathlib import Path

import pytest

from compress.cli.main import main
from helpers import tiny_models
from helpers.engine.quick_speed import quick_speed

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_speed(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("model"), dtype="fp32")


def test_roofline(folder: Path, capsys: Captured) -> None:
    assert main(["roofline", str(folder), "--batch", "2", "--against", str(folder)]) == 0
    text, said = capsys.readouterr()
    assert "calibrate: bandwidth and operations of this machine" in said
    for word in ("GB/s", "best batch", "first token", "over those of its source"):
        assert word in text
    options = ["--batch", "1", "--batch", "4", "--prompt", "10", "--output", "4", "--threads", "1"]
    assert main(["roofline", str(folder), *options, "--dtype", "bf16", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["machine"]["dtype"] == "bf16"
    assert facts["machine"]["threads"] == 1
    assert facts["texts"] == {"prompt": 10, "output": 4}
    assert [step["batch"] for step in facts["checkpoint"]["steps"]] == [1, 4]
    assert "source" not in facts


def test_bench(folder: Path, capsys: Captured, tmp_path: Path) -> None:
    options = ["--batch", "2", "--prompt", "10", "--output", "4"]
    out = tmp_path / "out"
    assert main(["bench", str(folder), *options, "--out", str(out)]) == 0
    text, said = capsys.readouterr()
    assert "measure: 2 texts of 10 + 4, about" in said
    assert "measured on texts of 10 + 4 tokens" in text
    assert main(["bench", str(folder), *options, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["measured"]
    assert found["batch"] == 2
    assert set(found["tokens_per_second"]) == {"measured", "expected"}
    speed = json.loads((out / "report.json").read_text())["speed"]
    assert speed["measured"][0]["batch"] == 2


def test_bench_of_every_math(folder: Path, capsys: Captured) -> None:
    """Of dense weights one; roofline has no such choice."""
    options = ["--batch", "1", "--prompt", "4", "--output", "3", "--math", "all"]
    assert main(["bench", str(folder), *options, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["maths"]
    assert row["math"] == "exact"
    assert row["of_bandwidth"] > 0
    assert main(["roofline", str(folder), *options]) == 2
    assert "'all' is not one of" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["roofline", "bench"])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ["--batch", "0"],
            "error: Invalid value for '--batch': 0 is not in the range 1<=x<=2147483647.",
        ),
        (["--device", "gpu"], "error: device is 'gpu'; it is 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        (["--prompt", "500"], "error: prompt 500 and output 1 are 501 tokens: the model reads 128"),
    ],
    ids=["batch", "device", "prompt"],
)
def test_mistakes(
    command: str, options: list[str], error: str, folder: Path, capsys: Captured
) -> None:
    assert main([command, str(folder), *options]) == 2
    text, said = capsys.readouterr()
    assert text == ""
    assert said.splitlines()[-1] == error


def test_a_folder_that_is_not_there(capsys: Captured) -> None:
    assert main(["roofline", "./nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
