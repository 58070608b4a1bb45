"""The search for scales of llama.cpp's types beside llama.cpp's own, in numbers a second of a core.

    python -m benchmarks.export.k_quants_speed --library FOLDER/libggml-base.so

The matrices of a model of 58 million numbers (17 blocks: hidden 512, ffn 1536), one block of them
at a time, with importance for every column. Theirs is ggml_quantize_chunk, which llama-quantize
calls for each run of rows; both run on one thread and take turns, and seconds are processor time.
Beside it stands what each loses: the weighted squared error as a share of the weighted square.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.export.k_quants import TYPES
from benchmarks.processes import setting, write_result
from compress.quant.ggml_kinds import KINDS
from compress_kernels import decode_blocks, round_blocks, status

HIDDEN, FFN, BLOCKS = 512, 1536, 17
SHAPES = ((4 * HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN))  # of a block, by their columns

Side = Callable[[Tensor, Tensor], Tensor]


def their_side(library: Path, kind: str) -> Side:
    """ggml's rounding of rows, uint8 [N, bytes]."""
    quantize = ctypes.CDLL(str(library)).ggml_quantize_chunk
    quantize.restype, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64
    quantize.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    layout = KINDS[kind]

    def run(weight: Tensor, importance: Tensor) -> Tensor:
        rows, columns = weight.shape
        data = torch.empty(rows, columns // layout.block * layout.size, dtype=torch.uint8)
        quantize(
            layout.number, weight.data_ptr(), data.data_ptr(), 0, rows, columns,
            importance.data_ptr(),
        )  # fmt: skip
        return data

    return run


def problem() -> list[tuple[Tensor, Tensor]]:
    """Matrices of a block, and what an error in each column weighs."""
    seeded = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(shape, generator=seeded) * 0.04 * torch.rand(shape[0], 1, generator=seeded),
            torch.rand(shape[1], generator=seeded).pow(3) + 0.01,
        )
        for shape in SHAPES
    ]


def measure(kind: str, library: Path, rounds: int) -> dict[str, Any]:
    sides: dict[str, Side] = {
        "ours": lambda w, importance: round_blocks(kind, w, importance),
        "llama.cpp": their_side(library, kind),
    }
    cases, seconds = problem(), {name: [] for name in sides}
    lost = dict.fromkeys(sides, 0.0)
    for number in range(rounds + 1):
        for name, run in sides.items():
            began = time.process_time()
            found = [run(*case) for case in cases]
            if number:
                seconds[name].append(time.process_time() - began)
            lost[name] = share_lost(kind, cases, found)
    spent = {name: statistics.median(each) for name, each in seconds.items()}
    numbers = sum(weight.numel() for weight, _ in cases)
    return {
        "seconds_of_the_model": {name: round(s * BLOCKS, 3) for name, s in spent.items()},
        "million_numbers_a_second": {n: round(numbers / s / 1e6, 1) for n, s in spent.items()},
        "times_their_speed": round(spent["llama.cpp"] / spent["ours"], 2),
        "lost": lost,
        "lost_ratio": round(lost["ours"] / lost["llama.cpp"], 4),
    }


def share_lost(kind: str, cases: list[tuple[Tensor, Tensor]], found: list[Tensor]) -> float:
    lost = whole = 0.0
    for (weight, importance), data in zip(cases, found, strict=True):
        apart = (decode_blocks(kind, data) - weight).double()
        lost += float((apart.square() * importance).sum())
        whole += float((weight.double().square() * importance).sum())
    return lost / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for kind in TYPES:
        rows[kind] = measure(kind, options.library, options.rounds)
        print(kind, rows[kind], flush=True)
    numbers = BLOCKS * sum(rows_ * columns for rows_, columns in SHAPES)
    result = {**setting("benchmarks.export.k_quants_speed"), "numbers": numbers, "types": rows}
    write_result("export_k_quants_speed", {**result, "kernels": status()})


if __name__ == "__main__":
    main()
