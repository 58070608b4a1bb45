"""Products on the CPU beside bandwidth, peaks and other programs' products of the same process.

    python -m benchmarks.kernels.cpu [--threads 2] [--rounds 50]

Each kind of product that an engine runs, 4096 x 4096 on 1, 8, 64 and 512 rows, codes in groups of
128. `read` is the time in which memory gives the weight's bytes: torch's product of a matrix of as
many and a vector. `peak` is that of as many of its instructions, in registers alone, by all
threads. of_bandwidth and of_peak are their shares of our time; of_roof that of the longer one. Of
peers the times over ours: a product of int4 with inputs of the same kind, or torch's of a weight in
bf16. Sides take turns, on copies of the weight that caches do not hold; medians, of processor time
for one thread and of wall time for more. Threads of a peer spin for work when it has done its own,
so with more threads a side runs for some milliseconds before it is timed. The result goes to
benchmarks/results.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.peaks import at_peak
from benchmarks.kernels.peers import Call, onnxruntime_nbits, torch_bf16, torch_int4pack
from benchmarks.kernels.timing import alternate, setting
from benchmarks.processes import threads_suffix, write_result
from compress_kernels.cpu.library import instruction_sets
from compress_kernels.ops.linear import linear
from compress_kernels.ops.packed import layout_for, packed_linear
from compress_kernels.ops.pairs import pair_linear
from compress_kernels.pairs import lay_out_pairs
from compress_kernels.panels import Math, Panels, by_panel, lay_out

SIDE, GROUP, COLD = 4096, 128, 128 << 20
ROWS = (1, 8, 64, 512)
SETTLING = 0.004


@dataclass(frozen=True, slots=True)
class Kind:
    """bits: of a weight's number in memory. instruction: of peaks.py, `each` times a product."""

    bits: int
    instruction: str
    each: int
    make: Callable[[Tensor, int], Call]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = {
        **setting(),
        "command": "python -m benchmarks.kernels.cpu",
        "isa": sorted(instruction_sets()),
        "rounds": options.rounds,
        "side": SIDE,
        "group": GROUP,
        "kinds": {},
    }
    with torch.inference_mode():
        for name in options.kinds:
            of = {rows: measure(name, rows, options) for rows in options.rows}
            result["kinds"][name] = of
            print(name, {rows: found["shares"] | found["peers"] for rows, found in of.items()})
    write_result(f"kernel_cpu{threads_suffix(options.threads)}", result)


def measure(name: str, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    kind, x = KINDS[name], torch.randn(rows, SIDE)
    nbytes = SIDE * SIDE * kind.bits // 8
    copies = max(2, COLD // nbytes)
    sides: dict[str, Call] = {"ours": kind.make(x, copies), "read": reads(nbytes)}
    peak = at_peak(kind.instruction, kind.each * rows * SIDE * SIDE // options.threads)
    sides.update({} if peak is None else {"peak": peak})
    sides.update(peers(name, x, copies))
    key, settling = ("cpu_s", 0.0) if options.threads == 1 else ("wall_s", SETTLING)
    of = alternate(sides, options.rounds, settling=settling)
    taken = {side: times[key] for side, times in of.items()}
    ours = taken["ours"]
    ceilings = {"of_bandwidth": taken["read"] / ours}
    if "peak" in taken:
        ceilings["of_peak"] = taken["peak"] / ours
    shares = ceilings | {"of_roof": max(ceilings.values())}
    others = {side: t / ours for side, t in taken.items() if side not in ("ours", "read", "peak")}
    return {"seconds": taken, "shares": _short(shares), "peers": _short(others)}


def reads(nbytes: int) -> Call:
    turn = cycle(torch.randn(max(2, COLD // nbytes), nbytes // 4096, 1024))
    vector = torch.randn(1024)
    return lambda: torch.mv(next(turn), vector)


def peers(name: str, x: Tensor, copies: int) -> Mapping[str, Call]:
    if name.startswith(("16 bits", "bf16")):
        return {"torch bf16": torch_bf16(x, SIDE, copies)}
    found: dict[str, Call | None] = {}
    if name == "int4, int16":
        found["torch int4pack"] = torch_int4pack(x, _codes(4), GROUP, copies)
    if name in ("int4, int8", "int4, exact"):
        level = 4 if name == "int4, int8" else 1
        called = f"MatMulNBits, accuracy_level {level}"
        found[called] = onnxruntime_nbits(x, SIDE, GROUP, copies, level)
    return {called: call for called, call in found.items() if call is not None}


def stored(dtype: torch.dtype, x: Tensor, copies: int) -> Call:
    """A weight as it is stored, products in fp32."""
    turn = cycle(torch.randn(copies, SIDE, SIDE).to(dtype))
    return lambda: linear(x, next(turn))


def pairs(x: Tensor, copies: int) -> Call:
    """A weight and rows of bf16."""
    weight, half = lay_out_pairs(torch.randn(SIDE, SIDE).bfloat16()), x.bfloat16()
    turn = cycle([weight] + [_cloned(weight) for _ in range(copies - 1)])
    return lambda: pair_linear(half, next(turn))


def _cloned(pairs: Any) -> Any:
    tensors = {name: value.clone() for name, value in _tensors(pairs)}
    return replace(pairs, **tensors)


def _tensors(record: Any) -> list[tuple[str, Tensor]]:
    named = ((name, getattr(record, name)) for name in record.__slots__)
    return [(name, value) for name, value in named if isinstance(value, Tensor)]


def coded(bits: int, math: Math, x: Tensor, copies: int) -> Call:
    layout = layout_for(math, x.dtype)
    codes = lay_out(_codes(bits), bits, layout)
    scales = by_panel((torch.rand(SIDE, SIDE // GROUP) * 0.01).bfloat16())
    one = Panels(codes, scales, None, None, (SIDE, SIDE), bits, GROUP, layout, torch.bfloat16)
    turn = cycle([_cloned(one) for _ in range(copies)])
    return lambda: packed_linear(x, next(turn), None, math)


def halves(bits: int, x: Tensor, copies: int) -> Call:
    """Codes that are decoded for rows of bf16."""
    return coded(bits, "exact", x.bfloat16(), copies)


def _codes(bits: int) -> Tensor:
    half = 1 << (bits - 1)
    return torch.randint(-half, half, (SIDE, SIDE), dtype=torch.int8)


def _short(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in values.items()}


KINDS = {
    "fp32": Kind(32, "fma", 1, partial(stored, torch.float32)),
    "16 bits, bf16": Kind(16, "fma", 1, partial(stored, torch.bfloat16)),
    "16 bits, fp16": Kind(16, "fma", 1, partial(stored, torch.float16)),
    "bf16 x bf16": Kind(16, "bf16", 1, pairs),
    "bf16 x int4": Kind(4, "bf16", 1, partial(halves, 4)),
    "bf16 x int8": Kind(8, "bf16", 1, partial(halves, 8)),
    "int4, exact": Kind(4, "fma", 1, partial(coded, 4, "exact")),
    "int4, int16": Kind(4, "vnni", 2, partial(coded, 4, "int16")),
    "int4, int8": Kind(4, "vnni", 1, partial(coded, 4, "int8")),
    "int8, int16": Kind(8, "vnni", 2, partial(coded, 8, "int16")),
    "int8, int8": Kind(8, "vnni", 1, partial(coded, 8, "int8")),
}


if __name__ == "__main__":
    main()
