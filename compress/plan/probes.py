"""How fast this machine is, found in a fraction of a second and by processor time.

A call's wall time is that of whatever else runs: of one plan on a busy machine two calls said 2.6
times as much. So calls are timed by the processor time of the thread they run in. One runs on each
core at once, as the work will, so that cores share caches, memory and execution units as they then
do; and each runs on one thread, since a thread that waits for others spins, which counts as work.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Barrier

import torch
from torch.nn.functional import silu

from compress.machine.other_work import OtherWork, other_work, read_processor
from compress.quant.rounding import clip_ratios
from compress.quant.scheme import QuantScheme
from compress_kernels import gram_, group_scale

Call = Callable[[], object]
# Makes the buffers of a call and returns the call.
Make = Callable[[], Call]
Clock = Callable[[], float]
Timed = tuple[list[float], float]  # processor seconds of each call, seconds that passed

# Processor seconds of a probe on each core, and calls at least.
BUDGET, LEAST_CALLS = 0.02, 5
# Cores that are probed at once: more of them would only take memory for their buffers.
MOST_COPIES = 8


@dataclass(frozen=True, slots=True)
class ProbedCall:
    """seconds: of a call whose work is spread over torch's threads, with nothing else to do.

    wall, processor: seconds that the probe took in all its threads together.
    """

    seconds: float
    wall: float
    processor: float


@dataclass(frozen=True, slots=True)
class MetLoad:
    """What else the machine did while it was probed. others: cores that it kept busy, of `cores`.

    slowdown: wall time over processor time of the probes, 1 or more.
    """

    others: float
    cores: int
    slowdown: float


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What this machine does a second with nothing else to do: operations of matrix products in the
    compute dtype and in fp32, Gram operations, weights through the scale search, bytes through
    element-wise passes. load: what else it did; None where the system does not say."""

    product: float
    product_fp32: float
    gram: float
    search: float
    elementwise: float
    load: MetLoad | None = None


def measure_rates(dtype: torch.dtype) -> MachineRates:
    """Quick probes; their buffers are small beside any model."""
    before = read_processor()
    ratios = clip_ratios("mse", QuantScheme())

    def product(kind: torch.dtype) -> Call:
        x, w = _filled(512, 512, dtype=kind), _filled(512, 512, dtype=kind)
        return lambda: x @ w

    def gram() -> Call:
        x, out = _filled(512, 512, dtype=dtype), torch.zeros(512, 512)
        return lambda: gram_(x, out)

    def search() -> Call:
        rows = _filled(1024, 128)
        return lambda: group_scale(rows, ratios, None, 4, True, torch.bfloat16)

    def elementwise() -> Call:
        x = _filled(512, 1024, dtype=dtype)
        return lambda: silu(x)

    cube, passed = 512**3, 2 * 512 * 1024 * dtype.itemsize
    calls = [probe(make) for make in (partial(product, dtype), partial(product, torch.float32))]
    calls += [probe(make) for make in (gram, search, elementwise)]
    seconds = [call.seconds for call in calls]
    return MachineRates(
        product=2 * cube / seconds[0],
        product_fp32=2 * cube / seconds[1],
        gram=cube / seconds[2],
        search=1024 * 128 / seconds[3],
        elementwise=passed / seconds[4],
        load=_met(calls, other_work(before, read_processor())),
    )


def probe(
    make: Make, clock: Clock = time.thread_time, wall: Clock = time.perf_counter
) -> ProbedCall:
    """One call, timed over about BUDGET processor seconds a core after one to warm up.

    clock: seconds of the calling thread's work; wall: seconds that pass.
    """
    threads = torch.get_num_threads()
    copies = min(threads, MOST_COPIES)
    barrier = Barrier(copies)

    def one(_: int) -> Timed:
        try:
            call = make()
            call()
        finally:
            barrier.wait()  # also where memory ran out: the others wait for all copies
        return _timed(call, clock, wall)

    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(copies, "probe") as pool:
            found = list(_started(pool, one, barrier))
    finally:
        torch.set_num_threads(threads)
    times = [seconds for own, _ in found for seconds in own]
    # The median: of calls on a busy machine the shortest is luck, as is the longest.
    middle = statistics.median(times)
    return ProbedCall(middle / threads, sum(passed for _, passed in found), sum(times))


def _started(
    pool: ThreadPoolExecutor, one: Callable[[int], Timed], barrier: Barrier
) -> Iterator[Timed]:
    """What each copy returns. Where the system refuses a thread, the others do not wait for it."""
    try:
        return pool.map(one, range(barrier.parties))
    except RuntimeError:
        barrier.abort()
        raise


def _timed(call: Call, clock: Clock, wall: Clock) -> Timed:
    """Seconds of each call, and those that passed."""
    times: list[float] = []
    began = wall()
    while sum(times) < BUDGET or len(times) < LEAST_CALLS:
        start = clock()
        call()
        times.append(clock() - start)
    return times, wall() - began


def _met(calls: Sequence[ProbedCall], others: OtherWork | None) -> MetLoad | None:
    if others is None:
        return None
    slowdown = sum(call.wall for call in calls) / sum(call.processor for call in calls)
    return MetLoad(others.busy_cores, others.cores, max(1.0, slowdown))


def _filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random values that leave torch's own generator alone."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
