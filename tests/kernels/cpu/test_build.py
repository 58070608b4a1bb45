"""Building the compiled kernels: cached, safe to race, and honest where it cannot be done."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compress_kernels.cpu import build, levels

pytestmark = pytest.mark.skipif(
    not any(build.shutil.which(name) for name in build.COMPILERS), reason="no C++ compiler"
)


def run_status(**environment: str) -> str:
    code = (
        "import torch, compress_kernels as k; o = torch.zeros(2, 2);"
        "k.gram_(torch.ones(3, 2).bfloat16(), o); assert o.sum() == 12; print(k.status()['cpu'])"
    )
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_can_be_switched_off() -> None:
    assert run_status(COMPRESS_MODEL_NO_NATIVE="1") == "torch, slower: COMPRESS_MODEL_NO_NATIVE=1"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert run_status(XDG_CACHE_HOME=str(blocked)).startswith("torch, slower: cannot write")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler found"):
        build.library_path()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError, match=r"failed: x.cpp:1: error: no such thing"):
        build.library_path()
    assert list((tmp_path / "cache" / "compress-model").iterdir()) == []


def _build_once(cache: str) -> str:
    os.environ["XDG_CACHE_HOME"] = cache
    return str(build.library_path())


def test_processes_that_race_get_one_whole_library(tmp_path: Path) -> None:
    compiler = tmp_path / "slow"
    compiler.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit\nsleep 0.2\n"
        'for last; do :; done\nprintf whole > "$last"\n'
    )
    compiler.chmod(0o755)
    os.environ["CXX"] = str(compiler)
    try:
        with multiprocessing.get_context("fork").Pool(4) as pool:
            paths = pool.map(_build_once, [str(tmp_path / "cache")] * 4)
    finally:
        del os.environ["CXX"]
    assert len(set(paths)) == 1
    assert Path(paths[0]).read_text() == "whole"
    assert len(list(Path(paths[0]).parent.iterdir())) == 1


def test_another_compiler_or_flag_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    first = build._fingerprint("g++", levels.AVX2)
    assert build._fingerprint("clang++", levels.AVX2) != first
    assert build._fingerprint("g++", levels.AVX512) != first
    monkeypatch.setattr(build, "FLAGS", ("-O2",))
    assert build._fingerprint("g++", levels.AVX2) != first
