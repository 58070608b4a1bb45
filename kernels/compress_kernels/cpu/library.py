"""The compiled library, loaded with ctypes (a call releases the interpreter's lock)."""

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from compress_kernels.cpu.build import BuildError, library_path, packaged_path
from compress_kernels.cpu.bundle import BundledLibrary
from compress_kernels.cpu.quota import quota
from compress_kernels.gptq import problem as grid

# As in csrc/columns.cpp, and in csrc/stored.h.
SCALE_KINDS = FLOAT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STATE_KINDS = {**FLOAT_KINDS, torch.int8: 3}


class GridStruct(ctypes.Structure):
    """Mirrors `Grid` in csrc/columns.cpp."""

    _fields_ = [
        ("code_min", ctypes.c_float),
        ("code_max", ctypes.c_float),
        ("symmetric", ctypes.c_int32),
        ("scale_kind", ctypes.c_int32),
        ("ratios", ctypes.c_void_p),
        ("ratio_count", ctypes.c_int64),
    ]


class Block(ctypes.Structure):
    """Mirrors `Block` in csrc/columns.cpp."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("factor", ctypes.c_void_p),
        ("importance", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("quantized", ctypes.c_void_p),
        ("lost", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("weight_stride", ctypes.c_int64),
        ("group_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("search", ctypes.c_int32),
        ("pulled", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class Native:
    """library: None where it cannot be built, for `reason`."""

    library: ctypes.CDLL | None
    reason: str


@functools.cache
def native() -> Native:
    """The library, built and loaded on the first call of a process."""
    try:
        path = library_path()
        library = (BundledLibrary if path == packaged_path() else ctypes.CDLL)(str(path))
    except (BuildError, OSError) as error:
        return Native(None, str(error))
    library.gptq_block.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.group_scale.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.gptq_block.restype = library.group_scale.restype = None
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    packed = ("packed_dots", "float_dots", "packed_rows", "packed_pairs")
    products = ("linear_rows", "head_rows", "pair_rows", *packed)
    rows = ("rms_norm", "layer_norm", "rotate_heads", "gate_rows", "spread_heads", "through_codes")
    choices = ("choose_experts", "highest_of_rows")
    blocks = ("round_blocks", "decode_blocks", "settle_blocks")
    for name in ("paged_attention", "store_states", *products, *rows, *choices, *blocks):
        function = getattr(library, name)
        function.argtypes, function.restype = [pointer], None
    library.run_program.argtypes, library.run_program.restype = [pointer, pointer], None
    library.gram_bf16.argtypes = [pointer, long, long, ctypes.c_int32, pointer]
    library.instruction_sets.restype = ctypes.c_char_p
    library.team_quota.argtypes, library.team_quota.restype = [ctypes.c_double], None
    library.team_quota(quota())
    return Native(library, str(path))


def instruction_sets() -> frozenset[str]:
    """Those of x86 that the compiled kernels use, by the names of /proc/cpuinfo ("avx2", "avx512f",
    "avx512_vnni", "avx512_bf16"); none without compiled kernels."""
    library = native().library
    return frozenset(library.instruction_sets().decode().split()) if library else frozenset()


def grid_struct(of: grid.Grid, ratios: Tensor) -> GridStruct:
    """The C form of a grid; `ratios` (fp32, contiguous) must outlive it."""
    kind = SCALE_KINDS[of.scale_dtype]
    pointer = ratios.data_ptr()
    return GridStruct(of.code_min, of.code_max, int(of.symmetric), kind, pointer, ratios.numel())


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
