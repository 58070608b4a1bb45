"""A wheel for this platform, with all levels compiled, out of the one that compiles on first use.

python -m compress_kernels.cpu.wheel dist/compress_model-0.1.0-py3-none-any.whl

The tag is that of this system, not manylinux: which C library the result needs is for auditwheel to
say, which reads it (CONTRIBUTING.md).
"""

import base64
import hashlib
import platform
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from compress_kernels.cpu.build import packaged_path
from compress_kernels.cpu.bundle import bundle
from compress_kernels.cpu.levels import NATIVE, levels

ANY = "py3-none-any"


def platform_wheel(pure: Path) -> Path:
    """The new wheel, beside the old one. `pure` must be made of the sources that run here. Raises
    BuildError, and ValueError for a wheel that is none and for a
    processor without levels."""
    if not pure.name.endswith(f"-{ANY}.whl"):
        raise ValueError(f"{pure.name} is not a wheel for any platform, *-{ANY}.whl")
    if levels() == (NATIVE,):
        raise ValueError(f"of {platform.machine()} a wheel would run on processors like this alone")
    tag = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    with zipfile.ZipFile(pure) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    package = packaged_path().parents[1].name
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / packaged_path().name
        bundle(built)
        files[f"{package}/{packaged_path().parent.name}/{built.name}"] = built.read_bytes()
    info = next(name for name in files if name.endswith(".dist-info/WHEEL"))
    text = files[info].decode().replace(f"Tag: {ANY}", f"Tag: {tag}")
    files[info] = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode()
    record = info.replace("/WHEEL", "/RECORD")
    files[record] = _record({name: data for name, data in files.items() if name != record}, record)
    made = pure.with_name(pure.name.replace(ANY, tag))
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return made


def _record(files: dict[str, bytes], own: str) -> bytes:
    """Name, hash and size of every file, and a line for this list itself, which has none."""
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    return "".join((*lines, f"{own},,\n")).encode()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(platform_wheel(Path(argument)))
