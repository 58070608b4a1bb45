"""Compile csrc/ once a machine into the user's cache.

The file name is a hash of sources, flags, compiler and instruction set, so neither an update nor
a home folder shared by different machines can load the wrong code. The library is written beside
its final name and renamed, so processes that race each end up with a whole file.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compress_kernels.cpu.levels import NATIVE, Level, chosen, features, levels

SOURCES = Path(__file__).parent.parent / "csrc"
PACKAGED = Path(__file__).parent.parent / "bundled"
# For any processor of its kind, whatever the level.
BASE = frozenset({"team.cpp"})
# No -ffast-math: rounding to codes relies on sums being done as written.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-w",
)
# Files whose results are the same bits at every level: no sum of a product is fused.
EXACT = frozenset({"super_blocks.cpp", "settle.cpp"})
UNFUSED = "-ffp-contract=off"
COMPILERS = ("g++", "c++", "clang++")
TIMEOUT = 600  # seconds; the longest file takes about 10 of a processor, all of them about 35


class BuildError(Exception):
    """No compiled kernels here; the message says why in one line."""


def library_path() -> Path:
    """That of all levels, if the package came with it; else that of the chosen one, compiled if
    this machine has none yet.

    Raises BuildError, and InstructionSetError for a level that cannot run here.
    """
    level = chosen()
    if os.environ.get("COMPRESS_MODEL_NO_NATIVE") == "1":
        raise BuildError("COMPRESS_MODEL_NO_NATIVE=1")
    if platform.system() == "Windows":
        raise BuildError("not built on Windows")
    if packaged_path().exists():
        return packaged_path()
    found = compiler()
    path = _cache_folder() / f"kernels-{level.name}-{_fingerprint(found, level)}.so"
    if not path.exists():
        _build(found, level, path)
    return path


def packaged_path() -> Path:
    """Where a wheel of these very sources has the library of all levels, if it has one."""
    flags = (*FLAGS, *sorted(EXACT), *(flag for level in levels() for flag in level.flags))
    return PACKAGED / f"kernels-{_digest(flags)}.so"


def compiler() -> str:
    """The path of the C++ compiler: $CXX, or the first that is found. Raises BuildError."""
    wanted = os.environ.get("CXX", "").strip()
    for name in (wanted, *COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildError("no C++ compiler found (looked for $CXX, g++, c++, clang++)")


def compile_objects(compiler: str, sources: Sequence[Path], flags: Sequence[str], to: Path) -> None:
    """An object file of each source, by its name, into the folder `to`; as many at once as there
    are cores. Raises BuildError."""

    def one(source: Path) -> None:
        unfused = (UNFUSED,) if source.name in EXACT else ()
        called = (compiler, *FLAGS, *flags, *unfused, f"-I{SOURCES}", "-c", str(source))
        run((*called, "-o", str(to / f"{source.stem}.o")))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, sources))


def run(command: Sequence[str]) -> str:
    """What a tool of the compiler prints. Raises BuildError with its first complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {TIMEOUT} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise BuildError(f"{command[0]} failed: {lines[0].strip()[:200]}")
    return done.stdout


def sources() -> tuple[list[Path], list[Path]]:
    """Files that are compiled for any processor, and those that are for a level."""
    found = sorted(SOURCES.rglob("*.cpp"))
    return [s for s in found if s.name in BASE], [s for s in found if s.name not in BASE]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "compress-model"


def _fingerprint(compiler: str, level: Level) -> str:
    # What -march=native depends on, where the compiler decides.
    here = (platform.machine(), *(sorted(features()) if level is NATIVE else ()))
    made_by = (compiler, _version(compiler), *platform.libc_ver())
    return _digest((*made_by, *FLAGS, *sorted(EXACT), *level.flags, *here))


def _version(compiler: str) -> str:
    """What the compiler says of itself; nothing where it does not run, which a build then tells."""
    try:
        return run((compiler, "--version"))
    except (BuildError, OSError):
        return ""


def _digest(words: Sequence[str]) -> str:
    """Of the words and all sources."""
    digest = hashlib.sha256("\0".join(words).encode())
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        name = source.relative_to(SOURCES).as_posix()
        digest.update(name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _build(compiler: str, level: Level, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            base, rest = sources()
            compile_objects(compiler, base, (), Path(folder))
            compile_objects(compiler, rest, level.flags, Path(folder))
            objects = sorted(str(found) for found in Path(folder).glob("*.o"))
            built = Path(folder) / path.name
            run((compiler, "-shared", "-pthread", *objects, "-o", str(built)))
            os.replace(built, path)
    except OSError as error:
        raise BuildError(f"cannot write {path}: {error.strerror or error}") from error
