"""Probes go by processor time: what other programs do in between changes no estimate."""

import itertools
from collections.abc import Callable, Iterator
from threading import Barrier, Thread

import pytest
import torch

from compress.machine.other_work import OtherWork, ProcessorReading, ProcessorTicks
from compress.plan import estimate as estimate_module
from compress.plan import probes as probes_module
from compress.plan.estimate import LEAST_OF, MOST_OF, WAITING, Estimate
from compress.plan.memory_needs import MemoryNeed
from compress.plan.probes import MetLoad

# As the tests of this folder find it is what they put in its place.
PROBE = probes_module.probe


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Watched(Barrier):
    """Of two copies, which wait a second at most, so that no test hangs."""

    freed = 0

    def __init__(self, parties: int) -> None:
        super().__init__(parties, timeout=1)

    def abort(self) -> None:
        Watched.freed += 1
        super().abort()


@pytest.fixture
def two_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(probes_module, "Barrier", Watched)
    monkeypatch.setattr(Watched, "freed", 0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Times:
    """A processor that works on a call for 2 ms, and passes `away` s with other programs at each
    `every`-th of them."""

    def __init__(self, away: float, every: int) -> None:
        self.work = self.passed = 0.0
        self.away, self.every, self.calls = away, every, itertools.count(1)

    def call(self) -> None:
        self.work += 0.002
        self.passed += 0.002 + (self.away if next(self.calls) % self.every == 0 else 0.0)


def probed(away: float, every: int) -> probes_module.ProbedCall:
    times = Times(away, every)
    return PROBE(lambda: times.call, clock=lambda: times.work, wall=lambda: times.passed)


@pytest.mark.usefixtures("one_thread")
def test_preemption_does_not_change_a_probe() -> None:
    quiet, busy = probed(0.0, 1), probed(0.03, 2)
    assert busy.seconds == pytest.approx(quiet.seconds) == pytest.approx(0.002)
    assert quiet.wall == pytest.approx(quiet.processor)
    assert busy.wall > 5 * busy.processor


def test_work_is_spread_over_the_threads_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy runs on one thread of its own, and torch's number comes back."""
    seen: list[int] = []
    before = torch.get_num_threads()
    ticks = itertools.count()

    def make() -> Callable[[], object]:
        return lambda: seen.append(torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        found = PROBE(make, clock=lambda: next(ticks) / 100)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
    assert len(seen) >= 2 * (1 + probes_module.LEAST_CALLS)
    assert found.seconds > 0


def test_what_the_machine_did_besides() -> None:
    calls = [probes_module.ProbedCall(1.0, 3.0, 1.0), probes_module.ProbedCall(1.0, 1.0, 1.0)]
    assert probes_module._met(calls, OtherWork(0.75, 2)) == MetLoad(1.5, 2, 2.0)
    assert probes_module._met(calls, None) is None


def test_rates_count_the_work_of_each_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """measure_rates with a machine that needs 1 ms for every call."""
    monkeypatch.undo()
    call = probes_module.ProbedCall(1e-3, 2e-3, 1e-3)
    monkeypatch.setattr(probes_module, "probe", lambda make: (make()(), call)[1])
    readings = iter(ProcessorReading(ProcessorTicks(busy, 100 + busy, 4), 0.0) for busy in (0, 100))
    monkeypatch.setattr(probes_module, "read_processor", lambda: next(readings))
    rates = probes_module.measure_rates(torch.float32)
    assert rates.product == rates.product_fp32 == 2 * rates.gram
    assert rates.gram == pytest.approx(512**3 / 1e-3)
    assert rates.search == pytest.approx(1024 * 128 / 1e-3)
    assert rates.load == MetLoad(4.0, 4, 2.0)


def estimated(load: MetLoad | None) -> Estimate:
    return Estimate(1000.0, (MemoryNeed("quantizing", 1),), load)


def test_a_range_and_what_other_work_makes_of_it() -> None:
    assert LEAST_OF < 1 < MOST_OF
    quiet = estimated(MetLoad(0.1, 2, 1.2))
    assert quiet.quiet_range == (1000 * LEAST_OF, 1000 * MOST_OF)
    assert quiet.loaded_range is None
    assert estimated(None).loaded_range is None
    busy = estimated(MetLoad(1.4, 2, 3.0))
    assert busy.loaded_range == (3000 * LEAST_OF, 3000 * WAITING * MOST_OF)
    plain = busy.to_json()
    assert plain["seconds"] == 1000.0
    assert plain["loaded"]["busy_cores"] == 1.4
    assert quiet.to_json()["loaded"] is None


def test_heads_beyond_those_that_are_probed_count(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []

    def probe(make: Callable[[], Callable[[], object]]) -> probes_module.ProbedCall:
        shapes.append(make()().shape)
        return probes_module.ProbedCall(1.0, 1.0, 1.0)

    monkeypatch.setattr(probes_module, "probe", probe)
    seconds = estimate_module.attention_seconds((1, 32, 16, 8), 16, torch.float32)
    assert shapes == [(1, 4, 16, 8)]
    assert seconds == 8.0


@pytest.mark.usefixtures("two_copies")
def test_a_copy_that_fails_ends_the_probe() -> None:
    numbers = itertools.count()

    def make() -> Callable[[], object]:
        if next(numbers):
            raise MemoryError
        return lambda: None

    with pytest.raises(MemoryError):
        PROBE(make)


@pytest.mark.usefixtures("two_copies")
def test_a_thread_that_does_not_start_ends_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    start, numbers = Thread.start, itertools.count()

    def refused(thread: Thread) -> None:
        if next(numbers):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start"):
        PROBE(lambda: lambda: None)
    assert Watched.freed == 1
