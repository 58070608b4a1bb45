"""Random lives of an engine, from a seed: what arrives when, what is preempted, what is aborted.

run() plays one and holds the engine to its books after every step; check_results() holds the
results to the fake decoder alone with each text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

from compress.runtime.engine.batch import FlatBatch
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request, RequestResult, Sampling, Update
from compress.runtime.sequences.sequence import Sequence, Status
from compress.runtime.sequences.tables import BlockTables, CacheGroup
from helpers.engine.fake_decoder import (
    VOCABULARY,
    FakeCache,
    FakeDecoder,
    facts,
    fake_sampler,
    logits_alone,
    pick,
)

WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (5,), (None, 4), (9, None, 1))
LONGEST = 44
# Whoever is thrown out again and again at one token a step would never get to his end.
PREEMPTED_STEPS = 40


@dataclass
class Schedule:
    """arrivals: step -> requests. preempt, abort: chances at every step. multiple: of rows."""

    block_size: int
    windows: tuple[int | None, ...]
    blocks: tuple[int, ...]
    limits: Limits
    reuse: bool
    eos: tuple[int, ...]
    arrivals: dict[int, list[Request]]
    preempt: float
    abort: float
    random: Random
    requests: list[Request]
    multiple: int


def draw(seed: int) -> Schedule:
    random = Random(seed)
    block_size = random.choice((1, 2, 3, 4, 8, 16))
    windows = random.choice(WINDOWS)
    limits = _limits(random)
    stems = [_tokens(random, 30) for _ in range(random.randint(1, 3))]
    requests = [_request(random, str(i), stems, limits) for i in range(random.randint(1, 6))]
    span = random.choice((1, 4, 15))
    arrivals: dict[int, list[Request]] = {}
    for request in requests:
        arrivals.setdefault(random.randrange(span), []).append(request)
    return Schedule(
        block_size=block_size,
        windows=windows,
        blocks=_blocks(random, block_size, windows, limits),
        limits=limits,
        reuse=random.random() < 0.8,
        eos=random.choice(((), (3,), (5, 11))),
        arrivals=arrivals,
        preempt=random.choice((0, 0, 0.1, 0.5)),
        abort=random.choice((0, 0, 0, 0.05)),
        random=random,
        requests=requests,
        multiple=random.choice((1, 16)),
    )


def _limits(random: Random) -> Limits:
    return Limits(
        tokens_per_step=random.choice((1, 4, 7, 16, 24, 64, 200)),
        sequences=random.choice((1, 2, 4, 8)),
        long_prefill=random.choice((0, 0, 1, 3, 7)),
        policy=random.choice(("mixed", "mixed", "separate", "static")),
        waiting_served_ratio=random.choice((0.0, 0.3, 1.2)),
        max_waiting_steps=random.choice((0, 3, 20)),
        static_batch=random.choice((1, 2, 8)),
    )


def _blocks(
    random: Random, size: int, windows: tuple[int | None, ...], limits: Limits
) -> tuple[int, ...]:
    """Room for the longest request, just so or with some to spare."""
    groups = tuple(CacheGroup(window, 2) for window in windows)
    tables = BlockTables(groups, size, limits.chunk(size))
    spare = random.choice((1.0, 1.0, 1.3, 3.0))
    return tuple(1 + int(spare * tables.bound(g, LONGEST - 1)) for g in range(len(windows)))


def _tokens(random: Random, length: int) -> tuple[int, ...]:
    return tuple(random.randrange(VOCABULARY) for _ in range(length))


def _request(random: Random, name: str, stems: list[tuple[int, ...]], limits: Limits) -> Request:
    stem = random.choice(stems)[: random.choice((random.randint(1, 30), random.randint(1, 4)))]
    prompt = stem + _tokens(random, random.choice((0, 0, 1, 5)))
    salt = random.choice(("", "", "", "other"))
    if random.random() < 0.7:
        most = random.randint(1, LONGEST - len(prompt))
        sampling = Sampling(
            seed=random.randrange(2),
            max_tokens=random.choice((1, min(most, 8), min(most, 20))),
            n=random.randint(1, min(3, limits.sequences)) if random.random() < 0.4 else 1,
            ignore_eos=random.random() < 0.3,
            stop_tokens=random.choice(((), (), (7,))),
        )
        return Request(name, prompt, sampling, salt=salt)
    if random.random() < 0.5 and len(prompt) > 1:
        return Request(name, prompt, score_from=random.randint(1, len(prompt) - 1), salt=salt)
    tails = [_tokens(random, random.randint(1, 8)) for _ in range(random.randint(1, 4))]
    begin = random.randint(1, len(prompt))
    return Request(name, prompt, score_from=begin, continuations=tuple(tails), salt=salt)


class Watched(FakeDecoder):
    """Looks at each batch before it is computed."""

    def __init__(self, look: Callable[[FlatBatch], None], multiple: int) -> None:
        super().__init__(multiple=multiple)
        self.look = look

    def forward(self, batch: FlatBatch, cache: FakeCache) -> torch.Tensor:
        self.look(batch)
        self.batches.clear()
        return super().forward(batch, cache)


def engine_of(schedule: Schedule) -> Engine:
    groups = tuple(map(CacheGroup, schedule.windows, schedule.blocks))
    decoder = Watched(lambda batch: check_batch(engine, batch), schedule.multiple)
    engine = Engine(
        LocalRunner(decoder, FakeCache(groups, schedule.block_size)),
        facts(schedule.eos),
        schedule.limits,
        reuse=schedule.reuse,
        sampler=fake_sampler,
    )
    return engine


def check_batch(engine: Engine, batch: FlatBatch) -> None:
    """Nothing shared and nothing cached is written, nothing twice; the budget holds."""
    limits, size = engine.limits, engine.tables.block_size
    separate = limits.policy == "separate"
    assert batch.count <= (limits.prompt_step(size) if separate else limits.tokens_per_step)
    multiple = engine.layout.multiple
    assert batch.multiple == multiple
    assert len(batch.ids) - batch.count == -batch.count % multiple
    assert len(batch.rows) % multiple == 0
    for pool, slots in zip(engine.tables.pools, batch.slots, strict=True):
        own, padding = slots[: batch.count].tolist(), slots[batch.count :].tolist()
        assert len(set(own)) == len(own)
        assert not any(padding)
        for block in {slot // size for slot in own}:
            assert pool.refs[block] == 1
            assert pool.cached[block] is None


def check_books(engine: Engine) -> None:
    scheduler = engine.scheduler
    engine.tables.check(scheduler.running)
    assert len(scheduler.running) <= engine.limits.running
    for queue, status in ((scheduler.waiting, "waiting"), (scheduler.running, "running")):
        orders = [sequence.order for sequence in queue]
        assert orders == sorted(set(orders))
        assert all(sequence.status is Status(status) for sequence in queue)
    assert not any(any(sequence.tables) for sequence in scheduler.waiting)
    for sequence in scheduler.running:
        assert sequence.computed <= len(sequence.tokens)
        _check_tables(engine.tables, sequence)


def _check_tables(tables: BlockTables, sequence: Sequence) -> None:
    """Blocks for what is computed and no more, but those behind a window."""
    for g, table in enumerate(sequence.tables):
        assert len(table) == tables.blocks(sequence.computed)
        trimmed = sequence.trimmed[g]
        assert not any(table[:trimmed])
        assert all(table[trimmed:])
        assert len(table) - trimmed <= tables.bound(g, len(sequence.tokens))


def run(schedule: Schedule) -> tuple[dict[str, list[RequestResult]], Engine]:
    """The results of each request, in order of index, and the engine at rest."""
    engine, random = engine_of(schedule), schedule.random
    results: dict[str, list[RequestResult]] = {request.id: [] for request in schedule.requests}
    tokens: dict[tuple[str, int], tuple[int, ...]] = {}
    step = 0
    while not engine.idle or step <= max(schedule.arrivals):
        for request in schedule.arrivals.get(step, []):
            engine.add(request)
        forced = random.random() < schedule.preempt and step < PREEMPTED_STEPS
        if engine.scheduler.running and forced:
            engine.scheduler.preempt(random.choice(engine.scheduler.running))
        if random.random() < schedule.abort:
            engine.abort(random.choice(schedule.requests).id)
        computed = engine.stats.computed
        busy = engine.scheduler.running or engine.scheduler.waiting
        for update in engine.step():
            _take(update, results, tokens)
        check_books(engine)
        assert not busy or engine.stats.computed > computed, "a step without progress"
        step += 1
    for pool in engine.tables.pools:
        assert pool.free == pool.count - 1
    return {name: sorted(r, key=lambda r: r.index) for name, r in results.items()}, engine


def _take(
    update: Update,
    results: dict[str, list[RequestResult]],
    tokens: dict[tuple[str, int], tuple[int, ...]],
) -> None:
    """Streamed tokens are those of the result; scores stream none."""
    key = (update.id, update.index)
    tokens[key] = (*tokens.get(key, ()), *update.tokens)
    if update.result is not None:
        results[update.id].append(update.result)
        assert tokens[key] in (update.result.tokens, ())


def check_results(schedule: Schedule, results: dict[str, list[RequestResult]]) -> None:
    for request in schedule.requests:
        count = len(request.continuations) or (request.sampling.n if request.sampling else 1)
        found = results[request.id]
        assert [result.index for result in found] == list(range(count)), request
        for result in found:
            tail = request.continuations[result.index] if request.continuations else ()
            if request.sampling is not None:
                check_generation(schedule, request, result)
            else:
                check_score(schedule.windows, request, result, request.prompt + tail)


def check_generation(schedule: Schedule, request: Request, result: RequestResult) -> None:
    """Each token is what the decoder says to the prompt and the tokens before, up to the end."""
    assert request.sampling is not None
    sampling = request.sampling
    text = [*request.prompt, *result.tokens]
    start = len(request.prompt)
    rows = logits_alone(text, start, schedule.windows)[start - 1 :]
    expected = [
        pick(row, request, result.index, start + k) for k, row in enumerate(rows[: len(text)])
    ]
    assert list(result.tokens) == expected[: len(result.tokens)]
    ends = {*sampling.stop_tokens, *(() if sampling.ignore_eos else schedule.eos)}
    stopped = [token in ends for token in result.tokens]
    assert not any(stopped[:-1])
    if result.finish_reason == "stop":
        assert stopped[-1]
    elif result.finish_reason == "length":
        assert len(result.tokens) == sampling.max_tokens
        assert not stopped[-1]
    else:
        assert result.finish_reason == "abort"


def check_score(
    windows: tuple[int | None, ...], request: Request, result: RequestResult, text: tuple[int, ...]
) -> None:
    """The same bits as the decoder gives to the whole text at once."""
    assert request.score_from is not None
    rows = torch.from_numpy(logits_alone(list(text), len(text), windows))
    scored = text[request.score_from :]
    rows = rows[request.score_from - 1 : -1]
    expected = rows.log_softmax(dim=-1)[torch.arange(len(scored)), torch.tensor(scored)].tolist()
    found = [report.logprob for report in result.logprobs]
    assert found == expected[: len(found)]
    if result.finish_reason == "stop":
        assert result.tokens == scored
        assert result.score == sum(expected)
        assert result.greedy == (rows.argmax(dim=-1).tolist() == list(scored))
    else:
        assert result.finish_reason == "abort"
        assert result.score is None
