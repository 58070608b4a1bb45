"""Which kernels this machine runs, for `doctor`."""

import importlib.util
from collections.abc import Mapping
from types import MappingProxyType

import torch

from compress_kernels.cpu import gram, levels, library
from compress_kernels.ops.pairs import compiled_pairs

_BF16 = "linear in bf16"
# Op -> what runs where it is compiled; the level it needs, below which the last word runs.
_OPS: Mapping[str, tuple[str, levels.Level, str]] = MappingProxyType(
    {
        "linear": (
            "compiled in fp32, with weights of any float; by torch in fp16",
            levels.BASELINE,
            "",
        ),
        _BF16: ("bf16 dot products", levels.BF16, "compiled, products of fp32"),
        "packed codes, exact": (
            "decoded in registers",
            levels.AVX512,
            "compiled, decoded to memory",
        ),
        "packed codes, int16 and int8": (
            "VNNI dots of 8-bit numbers",
            levels.VNNI,
            "compiled, products of 16 bits or more",
        ),
        "attention": ("compiled", levels.BASELINE, ""),
        "norms, rotations, gates, experts, rounding, cache": ("compiled", levels.BASELINE, ""),
        "gptq, scales": ("compiled", levels.BASELINE, ""),
        "gram": ("bf16 dot products", levels.BF16, "fp32 by torch"),
    }
)


def status() -> dict[str, str]:
    """One line each for `cpu`, `cpu_gram` and `gpu`; builds the compiled kernels if need be."""
    native = library.native()
    built = native.library is not None
    return {
        "cpu": f"compiled: {native.reason}" if built else f"torch, slower: {native.reason}",
        "cpu_gram": "bf16 dot products (AVX512_BF16)" if gram.has_bf16() else "fp32 by torch",
        "gpu": _gpu(),
    }


def paths() -> dict[str, str]:
    """`instruction set`, then each op: what runs on the CPU here, and why nothing faster."""
    if library.native().library is None:
        return {"instruction set": "none", **dict.fromkeys(_OPS, "torch: nothing is compiled")}
    level = levels.chosen()
    found = {"instruction set": f"{level.name}{_because(level)}"}
    for op, (compiled, needed, otherwise) in _OPS.items():
        runs = needed.needs <= level.needs
        why = f", not {compiled}: these need {needed.name}"
        found[op] = compiled if runs else f"{otherwise}{why}"
    if not compiled_pairs(torch.device("cpu")):
        found[_BF16] = "by torch: compiled for x86 alone"
    return found


def _because(level: levels.Level) -> str:
    """Why it is not a faster one."""
    faster = levels.levels()[levels.levels().index(level) + 1 :]
    if not faster:
        return ""
    if level != levels.best():
        return f": {levels.VARIABLE} says so; this processor runs {levels.best().name}"
    lacks = ", ".join(sorted(faster[0].needs - levels.features()))
    return f": for {faster[0].name} this processor lacks {lacks}"


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none found"
    if importlib.util.find_spec("triton") is None:
        return "torch, slower: triton is not installed (extra `gpu`)"
    return f"triton on {torch.cuda.get_device_name()}"
