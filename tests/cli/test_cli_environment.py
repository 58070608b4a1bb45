"""What the machine lacks, and what is missing in it, is one line; a fault of ours is not."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import invalidate_caches
from pathlib import Path

import pytest

from compress.cli.complaints import LINE, WORD, of_environment, of_user, shortened
from compress.cli.main import main
from compress.errors import CheckpointError
from helpers import tiny_models


@contextmanager
def handles(free: int) -> Iterator[None]:
    """So many files can be opened, in whatever place of the table."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, hard))
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for _ in range(free):
            os.close(held.pop())
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in held:
                os.close(fd)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_models.make("llama", folder, num_hidden_layers=1)
    return folder


@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("to", ["onnx", "dense"])
def test_few_file_handles(
    to: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["export", str(model), "--to", to, "--no-verify"][: 4 if to == "dense" else 5]
    if to == "dense":  # of a quantized one
        source = tmp_path / "source"
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(
            "name: x\nstages: [{method: rtn, scheme: {bits: 8, group_size: 32, symmetric: true}}]\n"
        )
        assert main(["run", str(recipe), "--model", str(model), "--out", str(source)]) == 0
        line[1] = str(source)
    assert main([*line, "--out", str(tmp_path / "first")]) == 0  # what is imported once is there
    capsys.readouterr()
    codes = []
    for free in range(8):
        out = tmp_path / f"out{free}"
        with handles(free):
            codes.append(main([*line, "--out", str(out)]))
        error = capsys.readouterr().err
        assert codes[-1] in (0, 2), error
        if codes[-1] == 2:
            assert "Traceback" not in error
            assert "Too many open files" in error.splitlines()[-1]
            assert error.endswith("; allow more open files (`ulimit -n 1024`), then run it again\n")
            assert not list(tmp_path.glob(f"out{free}*"))
    assert codes[0] == 2
    assert codes[-1] == 0


def without(package: str, *args: str) -> tuple[int, str]:
    """Exit code and stderr of a command line where a package cannot be imported."""
    script = (
        f"import sys; sys.modules[{package!r}] = None; from compress.cli.main import main;"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("package", "name", "line"),
    [("torch", "torch", ("plan", "x", "--model", "y")), ("yaml", "pyyaml", ("recipes",))],
)
def test_missing_packages(package: str, name: str, line: tuple[str, ...]) -> None:
    code, error = without(package, *line)
    assert code == 2
    assert error == (
        f"error: the package {package} cannot be loaded (import of {package} halted; None in"
        f" sys.modules); pip install --force-reinstall {name}\n"
    )


def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> BaseException:
    """What importing a package of that text raises."""
    invalidate_caches()
    (tmp_path / "broken_one").mkdir()
    (tmp_path / "broken_one" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (whatever the package raises)
        import broken_one  # type: ignore[import-not-found]  # noqa: F401
    return caught.value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise OSError('libcudart.so.12: cannot open')", "libcudart.so.12: cannot open"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("raise ValueError('numpy has changed size')", "numpy has changed size"),
        ("this is no Python", "invalid syntax (__init__.py, line 1)"),
    ],
)
def test_broken_packages(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert of_environment(imported(tmp_path, monkeypatch, text)) == (
        f"the package broken_one cannot be loaded ({reason});"
        " pip install --force-reinstall broken_one"
    )


def test_a_lack_while_importing_is_a_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "raise ImportError('libx.so: failed to map segment from shared object')"
    line = of_environment(imported(tmp_path, monkeypatch, text))
    assert line is not None
    assert line.startswith("the system refuses: Cannot allocate memory; free memory, or allow")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "Cannot allocate memory; free memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "free memory"),
        (RuntimeError("can't start new thread"), "allow more processes"),
        (OSError(errno.EMFILE, "x", "/a/b"), "Too many open files (/a/b); allow more open files"),
        (OSError(errno.ENAMETOOLONG, "x", b"/a/b"), "(/a/b); give it a shorter name"),
        (OSError(errno.ENOSPC, "x"), "No space left on device; make room, then run it again"),
    ],
)
def test_lacks(error: Exception, words: str) -> None:
    line = of_environment(error)
    assert line is not None
    assert words in line


@pytest.mark.parametrize(
    "error",
    [
        *(ZeroDivisionError("x"), RuntimeError("shapes differ"), FileNotFoundError(2, "x", "y")),
        *(OSError("no number"), ImportError("x", name="compress.nothing"), RecursionError("x")),
    ],
)
def test_faults_of_ours(error: Exception) -> None:
    assert of_environment(error) is None


def test_a_mistake_that_is_a_lack_gets_its_remedy() -> None:
    error = CheckpointError(f"cannot read it: {os.strerror(errno.EMFILE)}")
    error.__cause__ = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert of_user(error) == (
        "cannot read it: Too many open files; allow more open files (`ulimit -n 1024`), then run it"
        " again"
    )
    assert of_user(CheckpointError("it is broken; mend it")) == "it is broken; mend it"


def test_messages_are_cut_in_their_middle() -> None:
    place, value, remedy = "recipe.yaml:12: name", "x" * 100_000, "give a shorter one"
    line = shortened(f"{place}: is {value!r}; {remedy}")
    assert line.startswith(f"{place}: is 'xxx")
    assert line.endswith(f"xxx'; {remedy}")
    assert len(line) < WORD + 100
    many = shortened("place: " + "word " * 50_000 + "remedy")
    assert len(many) <= LINE
    assert many.startswith("place: word")
    assert many.endswith("word remedy")


def test_messages_have_one_line_that_can_be_printed() -> None:
    assert shortened("a\nb\x1b[31m\ud800 ä") == "a b\\x1b[31m\\ud800 ä"
    assert shortened("plain") == "plain"
    assert len(shortened("\x1b " * 1000)) <= LINE  # as it is printed
