"""Loads in predicted time: the steps are those of a real engine, each as long as expected."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.runtime.sequences.limits import Limits
from compress.speed.load import LoadRequest, Speed, even_load, percentile, play, predict, speed_of
from compress.speed.roofline import Curve, EngineRates, LookRates, ProductRates, expected
from compress.speed.workload import AttentionWork, Product, Workload, decode_load, prompt_load
from helpers import tiny_models

WORK = Workload(
    products=(
        Product((64, 64), "block", "dense", 2, 16_384),
        Product((256, 64), "head", "dense", 1, 65_536),
    ),
    other_bytes=0,
    attention=(AttentionWork((None, 8), products=4 * (16 + 16), state_bytes=256),),
)
GROWING = Curve(((1.0, 1.0), (2.0, 2.0)))
# Far from memory's end a position costs twice as much.
LOOKS = LookRates(Curve(((0.0, 0.01), (200_000.0, 0.02))), 0.02)
PRODUCT = ProductRates(((0.0, GROWING),))
RATES = EngineRates((PRODUCT, PRODUCT), (LOOKS,), GROWING, GROWING)
LIMITS = Limits(tokens_per_step=32)


def test_a_text_alone_takes_its_prompt_and_its_steps() -> None:
    (times,) = predict(WORK, RATES, [LoadRequest(tuple(range(40)), 3)], LIMITS, reuse=False)
    first = sum(
        expected(WORK, RATES, load).total
        for load in (prompt_load(WORK, 0, 32), prompt_load(WORK, 32, 40, wanted=1))
    )
    second = first + expected(WORK, RATES, decode_load(WORK, 1, 41)).total
    third = second + expected(WORK, RATES, decode_load(WORK, 1, 42)).total
    assert times == pytest.approx([first, second, third])


def test_texts_side_by_side_share_their_steps() -> None:
    jobs = [LoadRequest((1,) * 8, 4), LoadRequest((2,) * 8, 4)]
    a, b = predict(WORK, RATES, jobs, LIMITS, reuse=False)
    assert a == b
    step = expected(WORK, RATES, decode_load(WORK, 2, 10)).total
    assert a[2] - a[1] == pytest.approx(step)


def steps_of(times: Sequence[Sequence[float]]) -> list[list[int]]:
    """Which of the distinct moments each token has."""
    moments = sorted({at for own in times for at in own})
    return [[moments.index(at) for at in own] for own in times]


@pytest.mark.parametrize("reuse", [True, False])
def test_steps_are_those_of_the_engine(reuse: bool, tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path, dtype="fp32")
    jobs = [
        LoadRequest(tuple((7 * i * job + i) % 256 for i in range(size)), output)
        for job, (size, output) in enumerate([(40, 5), (3, 9), (17, 1), (60, 4)])
    ]
    jobs.append(LoadRequest(jobs[0].prompt, 6))  # begins as another does
    weights = open_weights(Checkpoint.open(folder))
    engine, _ = open_engine(weights, Opening(limits=LIMITS, cache_tokens=2000, reuse=reuse))
    ticks = count()
    real = play(engine, jobs, lambda: float(next(ticks)))
    assert steps_of(predict(WORK, RATES, jobs, LIMITS, reuse=reuse)) == steps_of(real)


def test_speed_by_hand() -> None:
    assert speed_of([[1.0, 2.0, 4.0], [3.0, 5.0]]) == Speed(5 / 5.0, 1.0, 3.0, 2.0, 2.0, 5.0)
    alone = speed_of([[2.0]])
    assert (alone.between_p50, alone.between_p99) == (None, None)
    assert [percentile(list(range(1, 101)), p) for p in (0, 50, 99, 100)] == [1, 50, 99, 100]


def test_an_even_load_has_prompts_that_differ() -> None:
    jobs = even_load(4, 20, 7, 100)
    assert {len(job.prompt) for job in jobs} == {20}
    assert {job.output for job in jobs} == {7}
    assert len({job.prompt[0] for job in jobs}) == 4
    assert all(0 <= token < 100 for job in jobs for token in job.prompt)
