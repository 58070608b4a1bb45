"""Random schedules: the tokens and the scores of every request are those it has alone."""

import pytest

from helpers.engine.schedules import check_results, draw, run

PART = 250


def play(seeds: range) -> None:
    for seed in seeds:
        schedule = draw(seed)
        try:
            results, _ = run(schedule)
            check_results(schedule, results)
        except Exception as error:  # any failure, with the seed that gives it again
            raise AssertionError(f"schedule {seed}: {error}") from error


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, 20))]
)
def test_five_hundred_schedules(part: int) -> None:
    """Those with a real decoder are in test_equivalence.py."""
    play(range(part * PART // 10, (part + 1) * PART // 10))


@pytest.mark.long
@pytest.mark.parametrize("part", range(78))
def test_twenty_thousand_schedules(part: int) -> None:
    """The others of 20,000."""
    play(range((part + 2) * PART, (part + 3) * PART))


@pytest.mark.long
def test_schedules_reach_what_they_are_for() -> None:
    """Hits, preemptions by force and for room, forks, aborts, scores, all policies."""
    engines, reasons, counts = [], set(), []
    for seed in range(100):
        schedule = draw(seed)
        results, engine = run(schedule)
        engines.append((schedule, engine))
        reasons |= {r.finish_reason for found in results.values() for r in found}
        counts += [len(found) for found in results.values()]
    assert reasons == {"stop", "length", "abort"}
    assert max(counts) >= 4
    assert sum(engine.stats.hit for _, engine in engines) > 200
    assert {schedule.limits.policy for schedule, _ in engines} == {"mixed", "separate", "static"}
    unforced = [engine for schedule, engine in engines if not schedule.preempt]
    assert sum(engine.scheduler.preemptions for engine in unforced) >= 2
