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
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "csrc"
# No -ffast-math: rounding to codes relies on sums being done as written.
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-w",
)
COMPILERS = ("g++", "c++", "clang++")
TIMEOUT = 300  # seconds; a build takes about 5


class BuildError(Exception):
    """No compiled kernels here; the message says why in one line."""


def library_path() -> Path:
    """The compiled library, built if this machine has none yet. Raises BuildError."""
    if os.environ.get("COMPRESS_MODEL_NO_NATIVE") == "1":
        raise BuildError("COMPRESS_MODEL_NO_NATIVE=1")
    if platform.system() == "Windows":
        raise BuildError("not built on Windows")
    found = compiler()
    path = _cache_folder() / f"kernels-{_fingerprint(found)}.so"
    if not path.exists():
        _build(found, path)
    return path


def compiler() -> str:
    """The path of the C++ compiler: $CXX, or the first that is found. Raises BuildError."""
    wanted = os.environ.get("CXX", "").strip()
    for name in (wanted, *COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildError("no C++ compiler found (looked for $CXX, g++, c++, clang++)")


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "compress-model"


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256("\0".join((compiler, *FLAGS, _instruction_set())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _instruction_set() -> str:
    """What -march=native depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return f"{platform.machine()} {line}"
    return f"{platform.machine()} {platform.processor()}"


def _build(compiler: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            _run(compiler, built)
            os.replace(built, path)
    except OSError as error:
        raise BuildError(f"cannot write {path}: {error.strerror or error}") from error


def _run(compiler: str, output: Path) -> None:
    sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
    command = [compiler, *FLAGS, *sources, "-o", str(output)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took more than {TIMEOUT} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise BuildError(f"{compiler} failed: {lines[0].strip()[:200]}")
