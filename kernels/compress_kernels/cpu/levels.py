"""The instruction sets that compiled kernels come in, and the one that runs here."""

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

VARIABLE = "COMPRESS_MODEL_ISA"
CPUINFO = Path("/proc/cpuinfo")


class InstructionSetError(ValueError):
    """COMPRESS_MODEL_ISA asks for what this processor lacks, or nobody knows."""


@dataclass(frozen=True, slots=True)
class Level:
    """needs: what a processor must have, by the names of /proc/cpuinfo. flags: of the compiler."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


def _level(name: str, below: Level | None, needs: str, flags: str) -> Level:
    if below is None:
        return Level(name, frozenset(needs.split()), tuple(flags.split()))
    return Level(name, below.needs | {*needs.split()}, (*below.flags, *flags.split()))


# Each has all that the one before has. Spelled out, not -march: a row's bits then depend on the
# level, not on how a compiler tunes for one processor.
BASELINE = _level("baseline", None, "", "")
AVX2 = _level("avx2", BASELINE, "avx2 fma f16c", "-mavx2 -mfma -mf16c")
AVX512 = _level(
    "avx512", AVX2, "avx512f avx512bw avx512dq avx512vl",
    "-mavx512f -mavx512bw -mavx512dq -mavx512vl",
)  # fmt: skip
VNNI = _level("avx512_vnni", AVX512, "avx512_vnni", "-mavx512vnni")
BF16 = _level("avx512_bf16", VNNI, "avx512_bf16", "-mavx512bf16")
X86 = (BASELINE, AVX2, AVX512, VNNI, BF16)
# Of other processors the compiler decides.
NATIVE = _level("native", None, "", "-march=native")


def levels() -> tuple[Level, ...]:
    """Those of this kind of processor, the fastest last."""
    return X86 if platform.machine() in ("x86_64", "AMD64") else (NATIVE,)


def best() -> Level:
    """The fastest that this processor runs."""
    return [level for level in levels() if level.needs <= features()][-1]


def chosen() -> Level:
    """The one that COMPRESS_MODEL_ISA names, else the fastest. Raises InstructionSetError."""
    wanted = os.environ.get(VARIABLE, "").strip()
    if not wanted:
        return best()
    runs = ", ".join(level.name for level in levels() if level.needs <= features())
    for level in levels():
        if level.name == wanted:
            lacks = ", ".join(sorted(level.needs - features()))
            if lacks:
                raise InstructionSetError(
                    f"{VARIABLE} is {wanted}: this processor has no {lacks}; it runs {runs}"
                )
            return level
    raise InstructionSetError(f"{VARIABLE} is {wanted!r}; this processor runs {runs}")


@functools.cache
def features() -> frozenset[str]:
    """What this processor and its system have, by the names of /proc/cpuinfo."""
    try:
        for line in CPUINFO.read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    known = {"AVX2": AVX2.needs, "AVX512": AVX512.needs}  # where the system does not say
    return known.get(torch.backends.cpu.get_cpu_capability(), frozenset())
