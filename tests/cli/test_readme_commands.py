"""What the README tells people to type: it parses, and writes below out/ alone."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from compress.cli.main import COMMANDS, cli, main

REPO = Path(__file__).resolve().parents[2]
README = (REPO / "README.md").read_text(encoding="utf-8")
OUTPUTS = ("--out", "-o")
COLUMNS, LINES = 80, 40  # of a screen, where the page of a forge or an editor shows text


def blocks() -> list[str]:
    """Lines of all shell blocks, those that a backslash continues joined."""
    found = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [line for block in found for line in block.replace("\\\n", " ").splitlines() if line]


def commands() -> Iterator[list[str]]:
    """Words of every command line of ours."""
    for line in blocks():
        words = shlex.split(line.rpartition("|")[2], comments=True)
        if words[:1] == ["compress-model"]:
            yield words[1:]


def test_there_are_some() -> None:
    assert len(list(commands())) >= 14
    assert {words[0] for words in commands()} == set(COMMANDS)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_it_parses(words: list[str]) -> None:
    with click.Context(cli) as ctx:
        command = cli.get_command(ctx, words[0])
        assert command is not None
        command.make_context(words[0], words[1:], parent=ctx)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_it_writes_below_out(words: list[str]) -> None:
    written = [words[i + 1] for i, word in enumerate(words[:-1]) if word in OUTPUTS]
    assert all(path.startswith("out/") for path in written)
    if words[0] in ("run", "export"):
        assert written


def test_other_lines_write_there_too() -> None:
    assert "mkdir -p out" in " ".join(blocks())
    assert not [x for x in re.findall(r"> ?([\w./-]+\.yaml)", README) if not x.startswith("out/")]
    for name in re.findall(r'(?:open_model|from_pretrained)\("([^"]+)"', README):
        assert name.startswith("out/")


def shown_lines(text: str) -> int:
    """Lines on a screen: prose is wrapped, blocks and empty lines are as they are."""
    found, fenced = 0, False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        found += 1 if fenced or not line else len(textwrap.wrap(line, COLUMNS))
    return found


def test_a_screen_shows_what_it_is_and_how_to_start() -> None:
    """Title, purpose in one paragraph, the command that installs and does the main job, what that
    needs, and what it ends with."""
    first, *rest = re.split(r"^(?=## )", README, flags=re.MULTILINE)
    title, purpose = first.strip().split("\n\n")
    assert title == "# compress-model"
    assert shown_lines(purpose) <= 6
    start = rest[0]
    needs = start.index("Needed: ")
    assert start.index("\nmake demo ") < needs < start.index("\nPerplexity ")
    assert shown_lines(first + start) <= LINES
    assert rest[1].startswith("## Install\n")


@pytest.mark.long
def test_the_main_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of it, in order, where the repository would be; exit code 0 of each."""
    (tmp_path / "examples").symlink_to(REPO / "examples")
    job = README.partition("## The main job")[2]
    block = re.search(r"```sh\n(.*?)```", job, re.DOTALL)
    assert block is not None
    (tmp_path / "copa.jsonl").write_text(
        '{"query": "The man broke his toe because", "choices": [" he fell", " it rained"],'
        ' "gold": 0}\n'
    )
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", block[1]],
        cwd=tmp_path,
        env={**os.environ, "PATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.name for path in tmp_path.iterdir()} == {"examples", "copa.jsonl", "out"}


def test_serve_says_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "out/small", "--port", "80"]) == 2
    said = capsys.readouterr().err
    assert "error: serve is not in this version; `vllm serve FOLDER` serves" in said
    for word in ("generate", "chat", "compress.open_model"):
        assert word in said
