"""`generate` and `chat`: text as it comes, in a terminal and in a pipe; mistakes in one line."""

import builtins
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compress.cli.main import main
from compress.cli.writing import write
from compress.runtime.loading.model import Model
from compress.runtime.sequences.request import Update
from helpers import tiny_models

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tiny_models.make("llama", made, dtype="fp32", max_position_embeddings=96)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def give(monkeypatch: pytest.MonkeyPatch, text: str, terminal: bool = False) -> None:
    stream = io.StringIO(text)
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", stream)


def generate(folder: Path, *arguments: str) -> int:
    return main(["generate", str(folder), *arguments, "--ignore-eos"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_a_full_disk_is_one_line(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    monkeypatch.setattr(sys, "stdout", full)
    assert generate(folder, "once upon", "--max-tokens", "2", *more) == 2
    monkeypatch.undo()
    said = "error: cannot write: No space left on device; make room, then run it again\n"
    assert capsys.readouterr().err == said


def test_a_prompt_is_continued(folder: Path, capsys: Captured) -> None:
    assert generate(folder, "once upon", "--max-tokens", "12") == 0
    text, said = capsys.readouterr()
    assert text.strip()
    assert text.endswith("\n")
    line = r"12 tokens, the first after [\d.]+ s, then [\d.]+ a second; ended by length\n"
    assert re.fullmatch(line, said)
    assert generate(folder, "once upon", "--max-tokens", "12", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (result,) = found["results"]
    assert result["text"].rstrip("\n") == text.rstrip("\n")
    assert len(result["tokens"]) == 12
    assert found["prompt"] == "once upon"
    took = result["durations"]
    assert 0 <= took["waiting_seconds"] <= took["first_token_seconds"] <= took["seconds"]
    behind_first = took["seconds"] - took["first_token_seconds"]
    assert took["tokens_per_second"] == pytest.approx(11 / behind_first)


def test_one_seed_one_text(folder: Path, capsys: Captured) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        options = ("--temperature", "1", "--seed", seed, "--max-tokens", "20", "--top-k", "40")
        assert generate(folder, "once", *options) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_the_prompt_may_come_through_a_pipe(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    give(monkeypatch, "once upon\n")
    assert generate(folder, *arguments, "--max-tokens", "5", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "once upon"


def test_several_outputs(folder: Path, capsys: Captured) -> None:
    assert generate(folder, "once", "-n", "2", "--temperature", "1", "--max-tokens", "9") == 0
    text, said = capsys.readouterr()
    parts = re.split(r"^--- \d of 2\n", text, flags=re.MULTILINE)
    assert len(parts) == 3
    assert parts[1] != parts[2]
    line = (
        r"18 tokens in 2 outputs, the first after [\d.]+ s, then [\d.]+ a second; ended by length"
    )
    assert re.fullmatch(line + r"\n", said)


def test_outputs_that_are_all_the_same(folder: Path, capsys: Captured) -> None:
    assert generate(folder, "once", "-n", "2", "--max-tokens", "4") == 0
    text, said = capsys.readouterr()
    first, second = re.split(r"^--- \d of 2\n", text, flags=re.MULTILINE)[1:]
    assert first == second
    remedy = "with temperature 0 all outputs are the same; --temperature 1 makes them differ"
    assert said.endswith(f"\nnote: {remedy}\n")


def test_a_prompt_that_leaves_no_room(folder: Path, capsys: Captured) -> None:
    assert generate(folder, "a " * 200) == 2
    line = (
        r"error: the prompt has \d+ tokens, which leaves no room for an output: the model reads 96;"
        r" write less\n"
    )
    assert re.fullmatch(line, capsys.readouterr().err)


def test_logprobs_are_in_the_json(folder: Path, capsys: Captured) -> None:
    assert generate(folder, "once", "--logprobs", "2", "--json", "--max-tokens", "3") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert [len(report["top"]) for report in result["logprobs"]] == [2, 2, 2]


def test_what_is_left_of_the_context_is_the_default(folder: Path, capsys: Captured) -> None:
    assert generate(folder, "once upon a time", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["results"][0]["tokens"]) + len(found["prompt_tokens"]) == 96


def test_options_reach_the_engine(folder: Path, capsys: Captured) -> None:
    options = ["--logit-bias", "70=100", "--presence-penalty", "2", "--max-tokens", "3", "--json"]
    assert generate(folder, "once", *options) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["tokens"] == [70, 70, 70]


def test_keys_and_values_in_8_bits(folder: Path, capsys: Captured) -> None:
    found = []
    for stored in ([], ["--kv-dtype", "fp32"], ["--kv-dtype", "int8"]):
        assert generate(folder, "once", "--logprobs", "1", "--json", *stored) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        found.append([chosen["logprob"] for chosen in result["logprobs"]])
    assert found[0] == found[1] != found[2]
    assert found[0][0] == pytest.approx(found[2][0], abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-dtype", "int4"], "'int4' is not one of 'fp32', 'bf16', 'fp16', 'int8'"),
        (["--top-p", "2"], "top_p is 2.0: a number above 0 to 1 is needed"),
        (["--temperature", "-1"], "temperature is -1.0: a number from 0 on is needed"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--max-tokens", "0"], "max_tokens is 0: a whole number from 1 on is needed"),
        (["--max-tokens", "500"], "max_tokens 500 are 501: the model reads 96"),
        (["-n", "0"], "n is 0: a whole number from 1 to 1024 is needed"),
        (["--logit-bias", "x=1"], "--logit-bias 'x=1': a token id and a number are needed"),
        (["--logit-bias", "999=1"], "logit_bias has token 999: an id from 0 to 255 is needed"),
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--stop", ""], "stop string '': 1 to 1000 characters are needed"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--stop", "\udcff"], "stop string '\\udcff' is not UTF-8"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, capsys: Captured, arguments: list[str], words: str
) -> None:
    assert main(["generate", str(folder), "x", *arguments]) == 2
    text, said = capsys.readouterr()
    assert text == ""
    (line,) = [line for line in said.splitlines() if not line.startswith("Usage:")]
    assert line.startswith("error: ")
    assert words in line


def test_text_that_is_none(folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bytes that are no UTF-8 come in."""
    line = "error: the text is not UTF-8: '\\udcff' at character 4; convert it first\n"
    assert main(["generate", str(folder), "caf\udcff"]) == 2
    assert capsys.readouterr().err == line
    give(monkeypatch, "caf\udcff")
    assert main(["generate", str(folder)]) == 2
    assert capsys.readouterr().err == line
    give(monkeypatch, "caf\udcff")
    assert chat(folder) == 2
    assert "is not UTF-8: '\\udcff'" in capsys.readouterr().err


def test_a_terminal_without_the_characters(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"  # type: ignore[assignment]

    terminal = Ascii()
    monkeypatch.setattr(sys, "stdout", terminal)
    write("naïve\n")
    assert terminal.getvalue() == "na?ve\n"


def test_other_mistakes(
    folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, "", terminal=True)
    assert main(["generate", str(folder)]) == 2
    assert "give a PROMPT, or - and text on standard input" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "no"), "x"]) == 2
    assert "does not exist" in capsys.readouterr().err


def interrupted(self: Model, *_: Any) -> Iterator[Update]:
    yield Update("a", 0, (1,), "some text", None)
    raise KeyboardInterrupt


def test_ctrl_c_ends_the_line(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "stream", interrupted)
    assert generate(folder, "once") == 130
    assert capsys.readouterr() == ("some text\n", "\ninterrupted\n")


def chat(folder: Path, *arguments: str) -> int:
    return main(["chat", str(folder), "--max-tokens", "8", "--ignore-eos", *arguments])


def test_a_chat_in_a_pipe(folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer sees what was said; without the first message the second has another."""
    answers = []
    for messages in ("the dog\n\nthe cat\n", "the cat\n"):
        give(monkeypatch, messages)
        assert chat(folder, "--system", "a girl") == 0
        answers.append(capsys.readouterr().out)
    assert answers[0].endswith("\n")
    assert not answers[0].endswith(answers[1])


def test_a_chat_outgrows_the_context(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, "the dog sat by the door\n" * 5)
    assert chat(folder) == 0
    assert capsys.readouterr().err == (
        "note: the conversation no longer fits the model's context; from here on its oldest"
        " messages are left out\n"
    )
    give(monkeypatch, "the dog " * 60)
    assert chat(folder) == 2
    assert re.search(
        r"error: the message is too long: \d+ tokens with what goes around it, and at most 88 leave"
        r" room for an answer, as the model reads 96; write less\n",
        capsys.readouterr().err,
    )


def test_a_chat_in_a_terminal(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends an answer, a mistake ends nothing, Ctrl-D ends the chat."""
    give(monkeypatch, "", terminal=True)
    lines = iter(["the dog", "", "the dog " * 60, "the cat"])

    def typed(mark: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr(builtins, "input", typed)
    assert chat(folder) == 0
    text, said = capsys.readouterr()
    assert text.count("\n") >= 3
    assert said.count("error: the message is too long") == 1
    lines = iter(["the dog", "the cat"])
    monkeypatch.setattr(Model, "stream", interrupted)
    assert chat(folder) == 0
    assert capsys.readouterr().out == "some text\nsome text\n\n"


def test_no_chat_template(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    for file in folder.glob("*.json*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert main(["chat", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no chat template, so it was hardly trained to chat; `compress-model gen" in line


def test_nobody_reads_on(folder: Path) -> None:
    """As with `| head -c 1`: the end is quiet."""
    process = subprocess.Popen(
        [sys.executable, "-m", "compress.cli", "generate", str(folder), "once"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said == b""


def test_a_real_terminal(folder: Path) -> None:
    """Ctrl-C at the mark, through a terminal's own signal."""
    pid, terminal = pty.fork()
    if pid == 0:
        # A job that a shell starts in the background ignores it, and so do its children.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-m", "compress.cli", "chat", str(folder), "--max-tokens", "4"]
        os.execv(sys.executable, command)
    seen, deadline = b"", time.monotonic() + 120
    asked = interrupted_once = False
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 5)[0]:
            if interrupted_once:  # readline misses a signal that comes just before it waits
                os.write(terminal, b"\x03")
            continue
        try:
            seen += os.read(terminal, 1000)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if b"> " in seen and not asked:
            os.write(terminal, b"the dog\n")
            asked = True
        if seen.count(b"> ") == 2 and not interrupted_once:
            os.write(terminal, b"\x03")
            interrupted_once = True
    else:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, seen
    assert asked
    assert interrupted_once
    assert b"Traceback" not in seen
