"""How long a call takes, and what this machine can do at most."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from compress.machine.memory import available_bytes
from compress.speed.roofline import Hardware
from compress_kernels.ops.linear import linear

RUNS = 5
# Of what is over in a few milliseconds so many times as many runs, each as much shorter.
TIMES = 5
# Read in turn, far more than caches hold, and at once; rows and columns of the product that is
# computed.
READ_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
STRIP_BYTES = {"cpu": 16 << 20, "cuda": 4 << 30}
SIDES = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Timer:
    """clock: seconds that never go back; those of the processor where other work would disturb,
    which says nothing of a GPU.
    """

    device: torch.device
    clock: Callable[[], float] = perf_counter
    runs: int = RUNS

    def now(self) -> float:
        """The clock, once everything asked of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    def every(self, call: Callable[[], object], times: int = 1) -> list[float]:
        """Seconds of each run, `times` as many; one more, not counted, comes first."""
        found = []
        for _ in range(times * self.runs + 1):
            start = self.now()
            call()
            found.append(self.now() - start)
        return found[1:]

    def seconds(self, call: Callable[[], object], times: int = 1) -> float:
        """The median."""
        return statistics.median(self.every(call, times))

    def least(self, calls: Sequence[Callable[[], object]]) -> float:
        """Of several calls that take turns, those of a first round not counted."""
        found = []
        for _ in range(self.runs + 1):
            for call in calls:
                start = self.now()
                call()
                found.append(self.now() - start)
        return min(found[len(calls) :])


def measure_machine(dtype: torch.dtype, timer: Timer) -> Hardware:
    """Bandwidth and operations a second, each the highest of what was tried. Takes a second.

    Bandwidth: of reading, summing and copying a buffer that no cache holds, strip by strip: one is
    over before another program gets the core. Operations: of torch's
    own product of large matrices in `dtype`, and of the engine's.
    """
    free = free_bytes(timer.device)
    with torch.inference_mode():
        return Hardware(_bandwidth(timer), _flops(dtype, timer), free)


def free_bytes(device: torch.device) -> int | None:
    """Memory that can be taken, None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def _bandwidth(timer: Timer) -> float:
    buffer = torch.ones(READ_BYTES[timer.device.type] // 4, device=timer.device)
    count = min(STRIP_BYTES[timer.device.type] // 4, len(buffer))
    vector, (upper, lower) = torch.ones(1024, device=timer.device), buffer.chunk(2)
    halves = zip(torch.split(upper, count // 2), torch.split(lower, count // 2), strict=True)
    ways: tuple[list[Callable[[], object]], ...] = (
        [partial(torch.mv, strip.view(-1, 1024), vector) for strip in torch.split(buffer, count)],
        [strip.sum for strip in torch.split(buffer, count)],
        [partial(half.copy_, other) for half, other in halves],
    )
    return 4 * count / min(timer.least(way) for way in ways)


def _flops(dtype: torch.dtype, timer: Timer) -> float:
    side = SIDES[timer.device.type]
    x, weight = (torch.ones(side, side, dtype=dtype, device=timer.device) for _ in range(2))
    products = (lambda: torch.mm(x, weight), lambda: linear(x, weight))
    return 2 * side**3 / min(min(timer.every(product)) for product in products)
