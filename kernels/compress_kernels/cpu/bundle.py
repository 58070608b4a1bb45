"""All levels in one shared object, as a wheel can carry it: which of them runs is known when it is
loaded, so nothing but the level's own code may use the level's instructions.

Templates of headers are what could break that: every object has its own copy, and a linker keeps
one of them. So the objects of a level are joined first, and all of its symbols made local, but for
the functions that Python calls, whose names then begin with the level's.
"""

import ctypes
import tempfile
from pathlib import Path
from typing import Any

from compress_kernels.cpu.build import compile_objects, compiler, run, sources
from compress_kernels.cpu.levels import Level, chosen, levels

# Of the file that is made for any processor, as csrc/team.cpp has them.
SHARED = "team_"


class BundledLibrary(ctypes.CDLL):
    """The functions of the chosen level by their plain names."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        function = self[name if name.startswith(SHARED) else f"{chosen().name}_{name}"]
        setattr(self, name, function)
        return function


def bundle(path: Path) -> None:
    """Compiles all levels into one library. Takes about 30 s. Raises BuildError.

    Needs GNU binutils, as g++ does.
    """
    found = compiler()
    with tempfile.TemporaryDirectory() as folder:
        base, rest = sources()
        compile_objects(found, base, (), Path(folder))
        for level in levels():
            objects = Path(folder) / level.name
            objects.mkdir()
            compile_objects(found, rest, level.flags, objects)
            _join(found, level, objects, Path(folder) / f"{level.name}.o")
        joined = sorted(str(found) for found in Path(folder).glob("*.o"))
        run((found, "-shared", "-pthread", *joined, "-o", str(path)))


def _join(compiler: str, level: Level, objects: Path, to: Path) -> None:
    """One object of all in a folder; only the functions that Python calls can be seen in it."""
    whole = objects / "whole"
    parts = sorted(str(part) for part in objects.glob("*.o"))
    # Groups would be merged with those of other levels by their names.
    run((_tool(compiler, "ld"), "-r", "--force-group-allocation", *parts, "-o", str(whole)))
    lines = run((_tool(compiler, "nm"), "--defined-only", "-g", str(whole))).splitlines()
    names = [line.split()[2] for line in lines if line.split()[1] == "T"]
    called = [name for name in names if not name.startswith("_Z")]
    kept, renamed = objects / "kept", objects / "renamed"
    kept.write_text("".join(f"{name}\n" for name in called))
    renamed.write_text("".join(f"{name} {level.name}_{name}\n" for name in called))
    objcopy = _tool(compiler, "objcopy")
    run((objcopy, f"--keep-global-symbols={kept}", str(whole)))
    run((objcopy, f"--redefine-syms={renamed}", str(whole), str(to)))


def _tool(compiler: str, name: str) -> str:
    """The one of binutils that belongs to the compiler."""
    return run((compiler, f"-print-prog-name={name}")).strip() or name
