"""Random lives of an engine with a real decoder; what each request gets is held to one_by_one.py.

The requests come from a fixed pool, so that their answers are computed once for all schedules.
Texts are short, as a step costs most whatever it holds: a life is some 25 steps.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from compress.runtime.decoder.kv import KVCache
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.refusals import ModelFacts
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.sampling.sampling import Choice, sample
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request, RequestResult, Sampling
from compress.runtime.sequences.sequence import Sequence
from compress.runtime.sequences.tables import BlockTables, CacheGroup
from helpers.engine.one_by_one import UNTIMED, OneByOne
from helpers.engine.schedules import check_books

LONGEST = 36
# Whoever is thrown out again and again at one token a step would never get to his end.
PREEMPTED_STEPS = 12


@dataclass(slots=True)
class Seen:
    """A sampler that keeps what it is given: logits by (request, index, tokens before)."""

    logits: dict[tuple[str, int, int], Tensor]

    def __call__(self, logits: Tensor, sequences: Several[Sequence]) -> list[Choice | None]:
        for row, sequence in zip(logits.clone(), sequences, strict=True):
            key = (sequence.request.id, sequence.index, sequence.generated)
            if key in self.logits:
                assert torch.equal(self.logits[key], row)
            self.logits[key] = row
        return sample(logits, sequences)


def pool_of(vocabulary: int, count: int = 40) -> list[Request]:
    random = Random(17)
    stems = [_tokens(random, vocabulary, 20) for _ in range(3)]
    return [_request(random, str(i), stems, vocabulary) for i in range(count)]


def _tokens(random: Random, vocabulary: int, length: int) -> tuple[int, ...]:
    return tuple(random.randrange(vocabulary) for _ in range(length))


def _request(random: Random, name: str, stems: list[tuple[int, ...]], vocabulary: int) -> Request:
    stem = random.choice(stems)[: random.choice((random.randint(1, 20), 8, 16, 20))]
    prompt = stem + _tokens(random, vocabulary, random.choice((0, 0, 1, 5)))
    if random.random() < 0.7:
        return Request(name, prompt, _sampling(random))
    if random.random() < 0.4 and len(prompt) > 1:
        return Request(name, prompt, score_from=random.randint(1, len(prompt) - 1))
    tails = tuple(_tokens(random, vocabulary, random.randint(1, 8)) for _ in range(3))
    return Request(name, prompt, score_from=len(prompt), continuations=tails)


def _sampling(random: Random) -> Sampling:
    """Half of them greedy, half of them with log-probabilities."""
    both = {
        "max_tokens": random.choice((1, 3, 6)),
        "n": random.choice((1, 1, 2, 3)),
        "logprobs": random.choice((0, 0, 0, 1, 4, 20)),
    }
    if random.random() < 0.5:
        return Sampling(**both)
    return Sampling(
        temperature=random.choice((0.7, 1.0, 1.5)),
        top_k=random.choice((0, 0, 20)),
        top_p=random.choice((1.0, 0.9)),
        min_p=random.choice((0.0, 0.05)),
        repetition_penalty=random.choice((1.0, 1.2)),
        frequency_penalty=random.choice((0.0, 0.5)),
        presence_penalty=random.choice((0.0, 0.5)),
        seed=random.randrange(1000),
        **both,
    )


def engine_of(oracle: OneByOne, random: Random, sampler: Seen) -> Engine:
    decoder, block_size = oracle.decoder, random.choice((1, 2, 3, 4, 8, 16))
    limits = Limits(
        tokens_per_step=random.choice((4, 7, 16, 24, 64)),
        sequences=random.choice((3, 4, 8)),
        long_prefill=random.choice((0, 0, 3, 7)),
        policy=random.choice(("mixed", "mixed", "mixed", "separate", "static")),
        static_batch=random.choice((3, 8)),
    )
    windows = decoder.how.windows
    tables = BlockTables(
        tuple(CacheGroup(window, 2) for window in windows), block_size, limits.chunk(block_size)
    )
    spare = random.choice((1.0, 1.0, 1.5, 4.0))
    blocks = [1 + int(spare * tables.bound(g, LONGEST)) for g in range(len(windows))]
    cache = KVCache(decoder.how, blocks, block_size, dtype=decoder.dtype, device=decoder.device)
    facts = ModelFacts(decoder.spec.context, decoder.spec.vocab, variant=decoder.how.variant)
    reuse = random.random() < 0.8
    return Engine(LocalRunner(decoder, cache), facts, limits, reuse=reuse, sampler=sampler)


def play(oracle: OneByOne, pool: list[Request], seed: int) -> Engine:
    """One life: two loads in a row, so that the second finds the cache of the first."""
    random, sampler = Random(seed), Seen({})
    engine = engine_of(oracle, random, sampler)
    preempt = random.choice((0, 0, 0.1, 0.4))
    for _ in range(2):
        requests = random.sample(pool, random.randint(1, 5))
        results = _serve(engine, random, requests, preempt)
        for request in requests:
            _check(oracle, request, results[request.id], sampler)
        sampler.logits.clear()
    return engine


def _serve(
    engine: Engine, random: Random, requests: list[Request], preempt: float
) -> dict[str, list[RequestResult]]:
    span = random.choice((1, 3, 6))
    arrivals = [(random.randrange(span), request) for request in requests]
    results: dict[str, list[RequestResult]] = {request.id: [] for request in requests}
    step = 0
    while not engine.idle or step < span:
        for at, request in arrivals:
            if at == step:
                engine.add(request)
        running = engine.scheduler.running
        if running and random.random() < preempt and step < PREEMPTED_STEPS:
            engine.scheduler.preempt(random.choice(running))
        for update in engine.step():
            if update.result is not None:
                results[update.id].append(update.result)
        check_books(engine)
        step += 1
    return results


def _check(oracle: OneByOne, request: Request, results: list[RequestResult], sampler: Seen) -> None:
    for result in results:
        untimed = replace(result, metrics=UNTIMED)
        if request.sampling is None:
            expected = oracle.score(request, result.index)
            assert untimed == expected, f"{untimed} is not {expected}"
            continue
        output = oracle.generation(request, result.index)
        assert untimed == output.result, f"{untimed} is not {output.result}"
        for number, row in enumerate(output.logits):
            found = sampler.logits[request.id, result.index, number]
            assert torch.equal(found, row), f"logits of token {number} differ"
    count = len(request.continuations) or (request.sampling.n if request.sampling else 1)
    assert sorted(result.index for result in results) == list(range(count))
