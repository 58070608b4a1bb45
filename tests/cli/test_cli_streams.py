"""Streams that are closed, full, or read by nobody: the command says so, or goes on without."""

import base64
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from compress.cli.main import main
from compress.cli.streams import ResultFile

REPO = Path(__file__).resolve().parents[2]
COMMAND = f"{shlex.quote(sys.executable)} -c 'from compress.cli.main import entry; entry()'"
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


def shell(line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A shell's line in which `command` is the command line."""
    return subprocess.run(
        ["bash", "-c", line.replace("command", COMMAND)],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), **environ},
        capture_output=True,
        text=True,
    )


def script(code: str, line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    start = f"from compress.cli.streams import open_streams; open_streams(); {code}"
    python = shlex.join([sys.executable, "-c", start])
    return shell(line.replace("script", python), **environ)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_fault(closed: str) -> None:
    done = shell(f"command recipes {closed}")
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (">&- " not in f" {closed} ".replace("2>&- ", ""))
    assert shell(f"command recipes nowhere {closed}").returncode == 2


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """Else what a library writes to standard error goes into it."""
    code = "import os; print(os.open('file', os.O_CREAT | os.O_WRONLY) > 2)"
    done = script(f'os = __import__("os"); os.chdir({str(tmp_path)!r}); {code}', "script <&- 2>&-")
    assert done.stdout == "True\n"


@needs_full
def test_a_full_standard_output_is_one_line() -> None:
    done = shell("command recipes >/dev/full")
    said = "error: cannot write to standard output: No space left on device; direct it elsewhere"
    assert done.returncode == 2
    assert done.stderr == f"{said}, then run it again\n"


def test_an_output_that_cannot_be_written_is_one_line() -> None:
    done = shell("command recipes --json 1</dev/null")
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write to standard output: Bad file descriptor;")


def test_an_input_that_cannot_be_read_is_one_line() -> None:
    """A text is read before its model is opened."""
    done = shell("command generate nowhere - 0>/dev/null")
    said = "error: cannot read standard input: Bad file descriptor; direct a text to it, then run"
    assert (done.returncode, done.stderr) == (2, f"{said} it again\n")


@needs_full
@pytest.mark.parametrize("lost", ["2>/dev/full", "2</dev/null"])
def test_notes_that_nobody_can_read_are_lost(lost: str) -> None:
    code = "import click; click.echo('note', err=True); print('result')"
    assert script(code, f"script {lost}").stdout == "result\n"
    assert shell(f"command recipes nowhere {lost}").returncode == 2


@pytest.mark.parametrize("what", ["recipes", "recipes --json"])
def test_a_reader_that_left_is_no_fault(what: str) -> None:
    done = shell(f"command {what} | true; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) in (("1\n", ""), ("0\n", ""))  # written before it left


def test_nobody_reads_on_ends_with_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    file = ResultFile(writer, "w")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(file), "utf-8"))
    assert main(["recipes"]) == 1
    file.close()


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_characters_that_the_encoding_lacks_are_json_still(encoding: str) -> None:
    """ASCII click takes for a mistake, and writes UTF-8."""
    value = {"folder": "b\udcff", "size": "−1.2 × é 🙂"}
    code = f"import click, json; click.echo(json.dumps({value!a}, ensure_ascii=False))"
    done = script(code, "script | base64 -w0", PYTHONIOENCODING=encoding)
    assert done.stderr == ""
    written = base64.b64decode(done.stdout).decode("utf-8" if encoding == "ascii" else encoding)
    lost = {"folder": "b?"} if encoding == "ascii" else {}
    assert json.loads(written) == {**value, **lost}
