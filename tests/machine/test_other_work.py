"""What other programs took is read from /proc/stat, and said where it disturbed a measurement."""

from dataclasses import replace
from pathlib import Path

import pytest

from compress.machine import other_work as other_work_module
from compress.machine.other_work import (
    OtherWork,
    ProcessorReading,
    other_work,
    parse_stat,
    read_processor,
    share_since,
)
from compress.report.disturbance import averaged, disturbance, taken
from compress.report.schema import StageRecord

STAT = """\
cpu  1000 20 300 5000 600 7 8 9 400 0
cpu0 500 10 150 2500 300 3 4 5 200 0
cpu1 500 10 150 2500 300 4 4 4 200 0
intr 12345
procs_running 3
"""


def reading(busy: int, total: int, own: float) -> ProcessorReading:
    ticks = parse_stat(STAT)
    assert ticks is not None
    return ProcessorReading(replace(ticks, busy=busy, total=total), own)


def test_ticks_of_all_cores() -> None:
    """What guests take is part of user time already; waiting for a disk is idle time."""
    ticks = parse_stat(STAT)
    assert ticks is not None
    assert (ticks.busy, ticks.total, ticks.cores) == (1344, 6944, 2)


@pytest.mark.parametrize("text", ["", "intr 5\n", "cpu  1 2 3\n", "cpu  a b c d e f g h\n"])
def test_another_system_says_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse_stat(text) is None
    (tmp_path / "stat").write_text(text)
    for path in (tmp_path / "stat", tmp_path / "nowhere"):
        monkeypatch.setattr(other_work_module, "STAT", path)
        assert read_processor() is None
        assert share_since(reading(0, 0, 0.0)) is None


def test_own_work_is_not_that_of_others() -> None:
    before = reading(busy=0, total=0, own=1.0)
    # Two cores for 5 s are 1000 ticks; 700 were busy, 400 of them with this process.
    assert other_work(before, reading(700, 1000, 5.0)) == OtherWork(pytest.approx(0.3), 2)
    found = other_work(before, reading(700, 1000, 5.0))
    assert found is not None
    assert found.busy_cores == pytest.approx(0.6)
    # Clocks differ by a tick or two: no share is below 0.
    assert other_work(before, reading(399, 1000, 5.0)) == OtherWork(0.0, 2)
    assert other_work(before, before) is None
    assert other_work(None, before) is None


def test_it_is_said_from_a_tenth_of_the_cores_on() -> None:
    assert disturbance(None) is None
    assert disturbance(0.099) is None
    line = "other work took 35 % of the cores meanwhile; a quiet machine is faster"
    assert disturbance(0.35) == line


def test_stages_count_by_their_time() -> None:
    stages = [
        StageRecord("a", 30.0, 1, others=0.4),
        StageRecord("b", 10.0, 1, others=0.0),
        StageRecord("c", 99.0, 1),
    ]
    assert taken(stages) == pytest.approx(0.3)
    assert averaged([(None, 1.0), (0.5, 0.0)]) is None
