"""Mixtures of experts by csrc/rows/experts.cpp; the specification of the choice is
reference.experts."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress_kernels.cpu.library import FLOAT_KINDS, native
from compress_kernels.cpu.program import CompiledOp, Given, Program, ProgramStruct

# What an expert's program is given, in this order: how many rows, threads, int64 numbers of rows.
EXPERT_NAMES = ("rows", "threads", "taken")


class ChoiceStruct(ctypes.Structure):
    """Mirrors `Choice` in csrc/rows/experts.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "index", "shares")),
        *((name, ctypes.c_int64) for name in ("rows", "experts", "chosen")),
        *((name, ctypes.c_int32) for name in ("normalised", "kind")),
    ]


class ExpertsStruct(ctypes.Structure):
    """Mirrors `Experts` in csrc/rows/experts.cpp."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("programs", "index", "shares", "made", "parts", "out")
        ),
        *((name, ctypes.c_int64) for name in ("rows", "experts", "chosen", "width")),
        *((name, ctypes.c_int32) for name in ("threads", "kind")),
    ]


def choose_experts(logits: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """As experts.choose_experts, arguments checked."""
    library = native().library
    assert library is not None, "the op falls back to the reference"
    logits = logits.contiguous()
    shares = logits.new_empty(len(logits), chosen, dtype=torch.float32)
    index = shares.new_empty(shares.shape, dtype=torch.int64)
    struct = choice_struct(logits, shares, index, normalised)
    library.choose_experts(ctypes.byref(struct))
    return shares, index


def choice_struct(logits: Tensor, shares: Tensor, index: Tensor, normalised: bool) -> ChoiceStruct:
    """What the C function is given: addresses of tensors that must outlive it, none with gaps.
    logits: floats."""
    return ChoiceStruct(
        logits.data_ptr(), index.data_ptr(), shares.data_ptr(),
        *logits.shape, shares.shape[1], normalised, FLOAT_KINDS[logits.dtype],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """Memory of a mixture, without gaps.

    shares, index: fp32 and int64 [rows, chosen]. made: floats [rows, width], where each expert's
    program leaves what it makes of its rows. parts: fp32 [rows, chosen, width]. out: [rows, width],
    of made's dtype.
    """

    shares: Tensor
    index: Tensor
    made: Tensor
    parts: Tensor
    out: Tensor


def experts_op(programs: Sequence[Program], routed: Routed) -> CompiledOp:
    """programs: of each expert, given EXPERT_NAMES and nothing else. A run gives rows, threads."""
    assert all(program.names == EXPERT_NAMES for program in programs), "what csrc gives them"
    each = (ProgramStruct * len(programs))(*(program.struct for program in programs))
    rows, chosen, width = routed.parts.shape
    struct = ExpertsStruct(
        ctypes.addressof(each),
        routed.index.data_ptr(), routed.shares.data_ptr(), routed.made.data_ptr(),
        routed.parts.data_ptr(), routed.out.data_ptr(),
        rows, len(programs), chosen, width, torch.get_num_threads(), FLOAT_KINDS[routed.made.dtype],
    )  # fmt: skip
    given = {"rows": Given("rows"), "threads": Given("threads")}
    return CompiledOp("run_experts", struct, given, (routed, each, *programs))
