"""Instruction sets: the fastest that the processor has, or the one that is asked for; and each is
only in its own code."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compress.cli.main import main
from compress.errors import RequestError
from compress.runtime.forms.form import Arithmetic
from compress_kernels import paths, status
from compress_kernels.cpu import build, levels, library
from compress_kernels.cpu.bundle import BundledLibrary, bundle
from compress_kernels.cpu.linear import linear_struct

needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86")
needs_tools = pytest.mark.skipif(
    not (shutil.which("g++") and shutil.which("objdump")), reason="no g++ or no objdump"
)
HERE = [level.name for level in levels.levels() if level.needs <= levels.features()]


def test_each_level_has_all_that_the_one_before_has() -> None:
    for below, above in zip(levels.X86, levels.X86[1:], strict=False):
        assert below.needs < above.needs
        assert below.flags == above.flags[: len(below.flags)]


@needs_x86
@pytest.mark.parametrize(
    ("has", "want"),
    [
        ("", "baseline"),
        ("avx2 fma", "baseline"),
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_bf16", "avx512"),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni", "avx512_vnni"),
    ],
)
def test_the_fastest_that_the_processor_has(
    has: str, want: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: fpu {has}\n")
    monkeypatch.setattr(levels, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(levels, "features", levels.features.__wrapped__)
    monkeypatch.setenv(levels.VARIABLE, "")
    assert levels.chosen().name == want
    monkeypatch.setenv(levels.VARIABLE, "avx512_bf16")
    with pytest.raises(levels.InstructionSetError, match=r"no avx.*; it runs baseline"):
        levels.chosen()
    monkeypatch.setenv(levels.VARIABLE, "baseline")
    assert levels.chosen() is levels.BASELINE


def test_an_unknown_level_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(levels.VARIABLE, "avx9")
    assert main(["bench", "/nowhere"]) == 2
    assert capsys.readouterr().err == (
        f"error: COMPRESS_MODEL_ISA is 'avx9'; this processor runs {', '.join(HERE)}\n"
    )
    library.native.cache_clear()
    try:
        with pytest.raises(RequestError, match="COMPRESS_MODEL_ISA is 'avx9'"):
            Arithmetic.here(torch.float32, "cpu")
    finally:
        library.native.cache_clear()


def test_paths_say_why_nothing_faster_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    if library.native().library is None:
        found = paths()
        assert found.pop("instruction set") == "none"
        assert set(found.values()) == {"torch: nothing is compiled"}
        return
    assert paths()["gram"].startswith(status()["cpu_gram"].partition(" (")[0])
    if len(HERE) > 1:
        monkeypatch.setenv(levels.VARIABLE, HERE[0])
        said = f"{HERE[0]}: COMPRESS_MODEL_ISA says so; this processor runs {HERE[-1]}"
        assert paths()["instruction set"] == said
        assert "these need avx512_bf16" in paths()["gram"]
        exact = "compiled, decoded to memory, not decoded in registers: these need avx512"
        assert paths()["packed codes, exact"] == exact
    monkeypatch.setattr("compress_kernels.ops.pairs._X86", False)
    assert paths()["linear in bf16"] == "by torch: compiled for x86 alone"


# Instructions that not every x86-64 has: AVX's begin with a v, those of its masks with a k; what
# else came with AVX2, and what compilers make of vectors by themselves where they may use SSE3 to
# SSE4.2.
SPECIAL = re.compile(
    r"v\w+|k(and|or|xor|not|mov|test|shift|add|unpck)\w*"
    r"|(popcnt|lzcnt|tzcnt|movbe|andn|bextr|blsi|blsr|blsmsk|mulx|pdep|pext|rorx|sarx|shlx|shrx)\w?"
    r"|crc32\w*|h(add|sub)p[sd]|addsubp[sd]|movddup|mov[sh][lh]dup|insertps|extractps"
    r"|(round|blend)\w+|pblend\w+|pmov[sz]x\w+|pinsr[bdq]|pextr[bdq]|p(min|max)(sb|uw|sd|ud)"
    r"|pshufb|ptest|pmulld|pmuldq|packusdw|pcmpeqq|pcmpgtq|pabs\w|psign\w|palignr|phadd\w+"
)


def special(objects: Path) -> dict[str, set[str]]:
    """Of each object the instructions that not every processor has."""
    found = {}
    for path in objects.glob("*.o"):
        command = ["objdump", "-d", "--no-show-raw-insn", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = (line.partition(":\t")[2].split() for line in text.splitlines())
        found[path.name] = {line[0] for line in lines if line and SPECIAL.fullmatch(line[0])}
    return found


@needs_x86
@needs_tools
def test_what_runs_everywhere_needs_nothing_special(tmp_path: Path) -> None:
    base, _ = build.sources()
    build.compile_objects("g++", base, (), tmp_path)
    assert special(tmp_path) == {"team.o": set()}


@needs_x86
@needs_tools
def test_what_needs_more_is_seen(tmp_path: Path) -> None:
    """Or no file would have anything special."""
    _, rest = build.sources()
    small = [source for source in rest if source.name == "gates.cpp"]
    build.compile_objects("g++", small, ("-mavx2", "-mfma"), tmp_path)
    (found,) = special(tmp_path).values()
    assert any("fmadd" in name for name in found)


@needs_x86
@needs_tools
@pytest.mark.long
def test_a_bundle_has_every_level_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, rest = build.sources()
    for name, sources in (("base", base), ("baseline", rest)):
        (tmp_path / name).mkdir()
        build.compile_objects("g++", sources, (), tmp_path / name)
        assert not any(special(tmp_path / name).values())
    path = tmp_path / "all.so"
    bundle(path)

    def names(file: Path, kind: str) -> set[str]:
        lines = build.run(("nm", "--defined-only", str(file))).splitlines()
        return {line.split()[2] for line in lines if line.split()[1] in kind}

    # What linkers may take from either of two objects, and what runs when a library is loaded.
    assert names(path, "WVu") <= names(tmp_path / "base" / "team.o", "WVu")
    assert [n for n in names(path, "t") if n.startswith("_GLOBAL__sub_I")] == [
        n for n in names(tmp_path / "base" / "team.o", "t") if n.startswith("_GLOBAL__sub_I")
    ]
    x, w = torch.randn(3, 40), torch.randn(50, 40)
    for name in HERE:
        monkeypatch.setenv(levels.VARIABLE, name)
        out = torch.empty(3, 50)
        compiled = BundledLibrary(str(path))
        compiled.linear_rows(ctypes.byref(linear_struct(x, w, None, out)))
        torch.testing.assert_close(out, x @ w.T)
        compiled.instruction_sets.restype = ctypes.c_char_p
        assert set(compiled.instruction_sets().decode().split()) <= levels.chosen().needs
        compiled.team_quota(ctypes.c_double(0.0))


def kernel_tests() -> list[Path]:
    folder = Path(__file__).parents[1]
    return sorted(path for path in folder.rglob("test_*.py") if path.stem not in LEFT_OUT)


def test_levels_are_held_to_the_tests_of_products() -> None:
    """Were none found, pytest would run whatever it finds by itself."""
    found = {path.stem for path in kernel_tests()}
    assert {"test_packed", "test_packed_floats", "test_packed_rounding", "test_linear"} < found
    assert {"test_pairs", "test_paged_attention", "test_rows"} < found


@pytest.mark.long
@pytest.mark.parametrize("level", HERE)
def test_every_level_passes_the_tests_of_the_kernels(level: str) -> None:
    tests = [str(path) for path in kernel_tests()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, levels.VARIABLE: level}
    done = subprocess.run(
        [*command, "-m", "not long and not gpu"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]


# Those that compile, or that run no compiled code.
LEFT_OUT = {"test_levels", "test_level_bits", "test_build", "test_triton", "test_cuda", "test_team"}
