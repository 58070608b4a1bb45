"""`compress-model export`, from the command line to the folder."""

import json
from pathlib import Path

import pytest

import compressed_models
import tiny_models
from compress.cli.main import main
from compress.quant.scheme import QuantScheme


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    original = tiny_models.make("llama", folder / "source", tied=True)
    return compressed_models.write(original, folder / "ct", QuantScheme(group_size=32)).folder


def test_export_writes_and_says_what(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(source), "--to", "gptq", "-o", str(out)]) == 0
    told = capsys.readouterr()
    assert "compressed-tensors -> gptq" in told.out
    assert "14 x int4 sym g32" in told.out
    assert told.out.rstrip().endswith(str(out))
    assert "export: tensors outside the blocks (1/3)" in told.err
    assert main(["inspect", str(out)]) == 0
    assert "quantization  gptq" in capsys.readouterr().out
    assert main(["export", str(source), "--to", "awq", "-o", str(out)]) == 2
    assert "add --overwrite" in capsys.readouterr().err
    assert main(["export", str(source), "--to", "awq", "-o", str(out), "--overwrite"]) == 0


def test_dry_run_and_json(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(source), "--to", "dense", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["result"]["format"] == "dense"
    assert found["result"]["path"] is None
    assert main(["export", str(source), "--to", "dense"]) == 2
    assert "give --out FOLDER, or --dry-run" in capsys.readouterr().err
    assert main(["export", str(source), "--to", "exl3", "--dry-run"]) == 2
    assert "--to is 'exl3'; it is one of compressed-tensors, gptq" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["fp8-block", "bitsandbytes", "modelopt"])
def test_what_does_not_fit_is_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    code = main(["export", str(source), "--to", to, "-o", str(tmp_path / "out")])
    said = capsys.readouterr().err
    if to == "modelopt":  # it holds 4 bits in groups, with scales in fp32
        assert code == 0
        return
    assert code == 2
    assert said.count("\n") == 1
    assert "model.layers.0.self_attn.q_proj does not fit into" in said
    assert "formats that hold all layers: compressed-tensors, gptq, gptq_v2, awq" in said
