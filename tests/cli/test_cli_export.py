"""`compress-model export`, from the command line to the folder."""

import json
from pathlib import Path

import pytest

from compress.cli.commands.export import HOLDS, TARGETS
from compress.cli.main import main
from compress.convert.plan import format_name
from compress.formats import CODECS
from compress.quant.scheme import QuantScheme
from compress_exporters.table import EXPORTERS
from helpers import compressed_models, tiny_models
from helpers.exporters.exports import CT


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
    assert "export: tensors outside the blocks (1/3)" in told.err
    assert "left     report/" not in told.out
    assert "\nOpen it\n  pip install gptqmodel optimum\n\n  from transformers" in told.out
    assert told.out.endswith(f'from_pretrained("{out}")\n\n{out}\n')
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
    assert not list(tmp_path.iterdir())


def test_the_dry_run_says_that_it_is_one(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["export", str(source), "--to", "gptq", "--dry-run"]
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert told.endswith("\n\nnothing was written: this is a dry run\n")
    assert 'from_pretrained("FOLDER")' in told
    assert main([*asked, "-o", str(tmp_path / "out")]) == 0
    assert f'from_pretrained("{tmp_path / "out"}")' in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_help_has_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(HOLDS) == list(CODECS)
    assert main(["export", "--help"]) == 0
    told = capsys.readouterr().out
    listed = told.partition("\nFormats:\n")[2].partition("\nOther runtimes:\n")[0].splitlines()
    assert [line.split()[0] for line in listed if line.startswith("  ") and line[2] != " "] == [
        *HOLDS
    ]


def test_help_has_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert dict(TARGETS) == {name: row.summary for name, row in EXPORTERS.items()}
    assert main(["export", "--help"]) == 0
    listed = capsys.readouterr().out.partition("\nOther runtimes:\n")[2].splitlines()
    assert [line.split()[0] for line in listed if line[2:3] not in ("", " ")] == [*TARGETS]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("GPTQ", "gptq"),
        ("gptq-v2", "gptq_v2"),
        ("GPTQ_V2", "gptq_v2"),
        ("FP8-Block", "fp8"),
        ("fp8_block", "fp8"),
        ("bnb", "bitsandbytes"),
        (" Dense", "dense"),
    ],
)
def test_formats_go_by_any_spelling(said: str, meant: str) -> None:
    assert format_name(said) == meant


@pytest.mark.parametrize(
    ("said", "nearest"), [("gtpq", "gptq"), ("AQW", "awq"), ("compressed_tensor", CT)]
)
def test_a_word_that_is_no_format(
    source: Path, capsys: pytest.CaptureFixture[str], said: str, nearest: str
) -> None:
    assert main(["export", str(source), "--to", said, "--dry-run"]) == 2
    assert capsys.readouterr().err == (
        f"error: --to is {said!r}; it is one of {', '.join((*CODECS, *EXPORTERS))};"
        f" did you mean {nearest!r}?\n"
    )


def test_a_word_like_no_format(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(source), "--to", "xyz", "--dry-run"]) == 2
    assert capsys.readouterr().err.endswith(f" one of {', '.join((*CODECS, *EXPORTERS))}\n")


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
    assert "(nor do 13 more layers): it holds " in said
    assert said.endswith(
        "; formats that take all of this checkpoint: gptq, gptq_v2, awq, modelopt, dense\n"
    )
