"""What an instruction can do in registers alone, on one thread."""

import atexit
import ctypes
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from compress_kernels.cpu.build import FLAGS, compiler, run
from compress_kernels.cpu.levels import AVX512, BF16, VNNI, features

# Products of a round of 12 instructions, and the level that has them.
INSTRUCTIONS = {"fma": (12 * 16, AVX512), "vnni": (12 * 64, VNNI), "bf16": (12 * 32, BF16)}


def at_peak(instruction: str, products: int) -> Callable[[], object] | None:
    """So many products of an instruction, None where this processor has none."""
    each, level = INSTRUCTIONS[instruction]
    if not level.needs <= features():
        return None
    call = getattr(_library(), instruction)
    return partial(call, ctypes.c_int64(products // each))


@cache
def _library() -> ctypes.CDLL:
    """peaks.cpp, compiled."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    path, source = str(Path(folder) / "peaks.so"), str(Path(__file__).with_name("peaks.cpp"))
    run((compiler(), *FLAGS, *BF16.flags, "-shared", source, "-o", path))
    return ctypes.CDLL(path)
