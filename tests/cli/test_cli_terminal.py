"""On a terminal: nothing wider than it, words whole, no colours; and what a shell completes."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compress.cli.commands.doctor import WIDEST
from compress.cli.main import COMMANDS, main
from compress.report.columns import aligned, fitted
from compress.report.terminal.cells import width
from compress.report.terminal.copied import indented
from compress.speed.table import _aligned
from compress.version import VERSION
from helpers.short_runs import RTN, recipe_file

REPO = Path(__file__).resolve().parents[2]
TALE = str(REPO / "examples" / "tale-6m")
WORD = re.compile(r"\S{60,}")  # paths, names of layers: they are there to be copied


def on_terminal(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """A command line whose output and errors go to a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    return main(words)


def too_wide(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if width(line) > 80 and not WORD.search(line)]
    return [line for line in lines if "\r" not in line]


@pytest.mark.parametrize(
    "words",
    [
        ["recipes"],
        ["plan", "int4-gptq", "--model", TALE],
        ["plan", "int4-gptq", "--model", TALE, "--modules"],
        ["plan", "smallest", "--model", TALE],
        ["plan", "prune-distill-int4", "--model", TALE],
        ["inspect", TALE],
        ["inspect", TALE, "--modules"],
        ["export", TALE, "--to", "onnx", "--dry-run"],
        ["export", TALE, "--to", "dense", "--dry-run"],
        ["doctor"],
        ["nonsense"],
        ["plan", "int4-gptq", "--model", TALE, "--set", "stages[0].group_size=7"],
        ["serve", "--help"],
    ],
    ids=" ".join,
)
def test_lines_fit(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_terminal(words, monkeypatch)
    said = capsys.readouterr()
    assert said.out + said.err
    assert not too_wide(said.out + said.err)
    assert "\x1b[" not in said.out


def test_what_goes_on_stands_below_its_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """doctor's values stay a column, whatever the longest name is."""
    assert on_terminal(["doctor"], monkeypatch) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    place = next(line.index(platform.python_version()) for line in lines)
    assert place <= WIDEST + 2
    for line in lines:
        named = line.partition("  ")[0]
        assert len(named) > WIDEST or (line[place - 2 : place].isspace() and line[place] != " ")


def test_a_run_and_its_export_fit(
    tiny: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, out = recipe_file(tmp_path, RTN), str(tmp_path / "out")
    for words in (
        ["run", str(asked), "--model", str(tiny("llama")), "-o", out],
        ["inspect", out],
        ["export", out, "--to", "gptq", "--dry-run"],
    ):
        assert on_terminal(words, monkeypatch) == 0
    said = capsys.readouterr()
    assert not too_wide(said.out)


def test_elsewhere_a_fact_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nonsense", "--model", TALE]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_words_are_whole() -> None:
    line = "error: " + "words " * 40 + "x" * 100 + " end"
    shown = fitted(line, 80).splitlines()
    assert " ".join(" ".join(shown).split()) == " ".join(line.split())
    assert all(width(x) <= 80 for x in shown if "xxx" not in x)
    assert all(x.startswith("  ") for x in shown[1:])
    assert fitted("  note     " + "word " * 30, 80).splitlines()[1].startswith(" " * 11 + "word")


@pytest.mark.parametrize("title", ["Open it", "Start it", "Start onnx-genai", "It is in"])
def test_blocks_to_copy_are_whole(title: str) -> None:
    """All of them: a newline within a command would end it."""
    blocks = ["pip install it", "llama-server -m " + "folder/ " * 20, "import it\n" + "it " * 40]
    copied = "\n".join([title, *indented(blocks), ""])
    prose = "words " * 30
    shown = fitted(f"{copied}\n{prose}", 80)
    assert shown.startswith(copied)
    assert all(width(line) <= 80 for line in shown.removeprefix(copied).splitlines())


def test_columns_stay_columns() -> None:
    rows = [("layer", "why", "bytes"), ("q_proj", "because " * 12 + "it is", "17"), ("k", "", "3")]
    lines = aligned(rows, 60)
    assert all(width(line) <= 60 for line in lines)
    place = lines[0].index("why")
    assert all(line[:place].strip() in ("", "layer", "q_proj", "k") for line in lines)
    assert " ".join(x[place:].split("  ")[0] for x in lines[1:-1]).split() == rows[1][1].split()
    assert aligned([("a", "b"), ("c", "d" * 100)], 60)[1] == "c  " + "d" * 100


def test_a_wide_table_of_speed_goes_on_below() -> None:
    titles = ("batch", *(x for i in range(6) for x in (f"column {i} of it", "")))
    rows = [titles, ("8", *(["1234.5", "(1234.5)"] * 6))]
    lines = _aligned(rows)
    assert all(width(line) <= 80 for line in lines)
    assert sum("batch" in line for line in lines) == 3
    assert sum(line.count("(1234.5)") for line in lines) == 6


def test_nothing_is_coloured(tmp_path: Path) -> None:
    """In a real terminal, with and without NO_COLOR: no escape but the one that clears a line."""
    import pty

    code = "from compress.cli.main import entry; entry()"
    for environ in ({"NO_COLOR": "1"}, {"TERM": "xterm-256color"}, {"TERM": "dumb"}):
        first, second = pty.openpty()
        done = subprocess.run(
            [sys.executable, "-c", code, "recipes", "nowhere"],
            env={**os.environ, "PYTHONPATH": ":".join(sys.path), "COLUMNS": "80", **environ},
            stdout=second,
            stderr=second,
            cwd=tmp_path,
        )
        os.close(second)
        said = os.read(first, 100_000).decode()
        os.close(first)
        assert done.returncode == 2
        assert "error: " in said
        assert "\x1b" not in said
        assert not too_wide(said.replace("\r\n", "\n"))


def completed(line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> list[str]:
    """What bash is told for the last word of a line."""
    words = line.split(" ")
    monkeypatch.setenv("_COMPRESS_MODEL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    assert main([]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("compress-model i", ["plain,inspect"]),
        ("compress-model run int8", ["plain,int8-rtn"]),
        ("compress-model recipes w8", ["plain,w8a8-rtn", "plain,w8a8-smoothquant"]),
        ("compress-model plan ./mine", ["file,./mine"]),
        ("compress-model run int8-rtn --model ex", ["dir,ex"]),
        ("compress-model export small --to gp", ["plain,gptq", "plain,gptq_v2"]),
        ("compress-model export small --to on", ["plain,onnx", "plain,onnx-genai"]),
        ("compress-model run int8-rtn --set output.format=a", ["plain,output.format=awq"]),
        ("compress-model run mine.yaml --set output.format=gg", ["plain,output.format=gguf"]),
        ("compress-model run int8-rtn --set se", ["plain,seed"]),
        ("compress-model compare small --for vllm-", ["plain,vllm-gpu", "plain,vllm-cpu"]),
        ("compress-model compare small --for l", ["plain,llama.cpp"]),
        ("compress-model export small --type Q4_K", ["plain,Q4_K_S", "plain,Q4_K_M"]),
        ("compress-model export small --type q6", ["plain,q6_k"]),
    ],
)
def test_a_shell_completes(
    line: str, found: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed(line, monkeypatch, capsys) == found


def test_the_version_has_a_short_name(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("-V", "--version"):
        assert main([word]) == 0
        assert VERSION in capsys.readouterr().out
    assert "serve" not in COMMANDS
