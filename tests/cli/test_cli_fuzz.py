"""Random changes of a valid checkpoint: commands end with 0, or with one line and no file."""

import contextlib
import io
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.checkpoint import Checkpoint
from compress.cli.main import main
from compress.errors import CompressError
from compress.formats import open_weights
from helpers.fuzzing import KINDS, Sound, copy_into, tries
from helpers.mutations import change_config, change_header

QUICK = ("ct-mixed", "gptq-asym", "bitsandbytes")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text("a small dog sat by the door and looked at the rain for a long time")
    return path


def change(data: st.DataObject, folder: Path) -> None:
    header = data.draw(st.integers(0, 3)) == 0
    (change_header if header else change_config)(data, folder)


def told(*args: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(args)
    return code, out.getvalue(), err.getvalue()


def look(folder: Path, text: Path) -> str:
    """Try all commands. Returns "refused" or "read"."""
    code, out, err = told("inspect", str(folder))
    assert code == 0 or _is_one_line(err) or (code == 1 and not err and out), (code, out, err)
    opens = _opens(folder)
    made = folder.parent / "made"
    for command in (
        ("export", str(folder), "--to", "dense", "--out", str(made)),
        ("eval", str(folder), "--text", str(text), "--max-tokens", "8", "--out", str(made)),
    ):
        shutil.rmtree(made, ignore_errors=True)
        code, out, err = told(*command)
        assert code in (0, 2), f"{command[0]} ends with {code}: {err}"
        assert code == 2 or opens, f"{command[0]} takes what cannot be opened"
        if code == 2:
            assert _is_one_line(err), f"{command[0]} says {err}"
            assert not out, f"{command[0]} is refused and prints {out}"
            found = [x for path in folder.parent.glob("made*") for x in path.rglob("*")]
            assert not found, f"{command[0]} is refused and leaves {found}"
    return "read" if opens else "refused"


def _is_one_line(err: str) -> bool:
    """The refusal, after lines of progress."""
    *before, last = err.splitlines() or [""]
    return last.startswith("error: ") and not any("rror" in line for line in before)


def _opens(folder: Path) -> bool:
    try:
        open_weights(Checkpoint.open(folder))
    except CompressError:
        return False
    return True


def run(kind: str, text: Path, folder: Path, examples: int, fixed: bool) -> None:
    sound = Sound.make(kind, folder / "sound" / "model")
    found: Counter[str] = Counter()

    @tries(examples, fixed)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        changed = folder / "changed" / "model"
        copy_into(sound, changed)
        change(data, changed)
        found[look(changed, text)] += 1

    check()
    assert found["refused"]
    assert found["read"]


@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("kind", QUICK)
def test_commands(kind: str, text: Path, tmp_path: Path) -> None:
    run(kind, text, tmp_path, 8, fixed=True)


@pytest.mark.long
@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("kind", KINDS)
def test_commands_with_many_changes(kind: str, text: Path, tmp_path: Path) -> None:
    run(kind, text, tmp_path, 400, fixed=False)
