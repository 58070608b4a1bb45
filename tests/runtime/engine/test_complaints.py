"""What users of large engines complain about, as far as it falls on an engine.

The same text from any batch is in test_equivalence, caches of texts that collide in test_prefix,
a context larger than the cache in test_model.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from torch import Tensor

from compress.runtime.engine.engine import Engine
from compress.runtime.engine.scheduler import Scheduler
from compress.runtime.sampling import head
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request, Sampling
from compress.runtime.sequences.sequence import Sequence
from helpers.engine.fake_decoder import VOCABULARY, FakeDecoder, alone, engine_with

PROMPT = tuple(i % 23 for i in range(3, 63, 3))


def ask(name: str, prompt: tuple[int, ...] = PROMPT, most: int = 6, n: int = 1) -> Request:
    return Request(name, prompt, Sampling(max_tokens=most, n=n))


@dataclass
class Counted(FakeDecoder):
    """rows: how many of logits were asked at once."""

    rows: list[int] = field(default_factory=list)

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows.append(len(hidden))
        return super().logits(hidden)


@pytest.mark.parametrize("multiple", [1, 16])
def test_scores_never_hold_all_logits(monkeypatch: pytest.MonkeyPatch, multiple: int) -> None:
    """transformers 46434, vLLM 5907, lm-eval 2698: [tokens, vocabulary] of a text did not fit."""
    tails = tuple((i, i + 1, i + 2) for i in range(20))
    requests = [Request("a", PROMPT * 4, score_from=1), Request("b", PROMPT, None, 20, tails)]
    expected = [result.score for result in engine_with().generate(requests)]
    decoder = Counted(multiple=multiple)
    monkeypatch.setattr(head, "LOGITS_BYTES", 4 * VOCABULARY * 32)
    found = engine_with(decoder=decoder).generate(requests)
    assert [result.score for result in found] == expected
    assert max(decoder.rows) == 32
    assert sum(decoder.rows) >= 79 + 1 + 20 * 2


def test_a_second_load_has_its_own_results() -> None:
    """transformers 45943: requests of a second call were looked up by the numbers of the first."""
    engine = engine_with()
    for first in (0, 3):
        requests = [ask(str(i), PROMPT[first + i :], 4) for i in range(3)]
        results = engine.generate(requests)
        assert [result.id for result in results] == ["0", "1", "2"]
        assert [list(result.tokens) for result in results] == [alone(r) for r in requests]


def test_whoever_is_put_back_leaves_no_block_that_nobody_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """text-generation-inference 2489: candidates that did not fill a batch gave back blocks that
    were found as their prefix later, and nothing was ever written there."""
    back: list[int] = []
    withdraw = Scheduler.withdraw

    def withdrawn(scheduler: Scheduler, sequence: Sequence) -> None:
        back.append(sequence.computed)
        withdraw(scheduler, sequence)

    monkeypatch.setattr(Scheduler, "withdraw", withdrawn)
    limits = Limits(policy="separate", waiting_served_ratio=0.5, max_waiting_steps=4, sequences=9)
    engine = engine_with(blocks=30, limits=limits)
    running = [ask(f"r{i}", PROMPT[i : i + 3], 12) for i in range(6)]
    waiting = [ask(f"w{i}", (*PROMPT[:12], i), 40 if i else 4) for i in range(4)]
    engine.generate([ask("first", PROMPT[:13], 1)])
    for request in running:
        engine.add(request)
    engine.step()
    for request in waiting:
        engine.add(request)
    found = {result.id: result for result in engine.generate([ask("last", PROMPT[:13], 4)])}
    while not engine.idle:
        found |= {u.id: u.result for u in engine.step() if u.result is not None}
        engine.tables.check(engine.scheduler.running)
    for request in (*running, *waiting, ask("last", PROMPT[:13], 4)):
        assert list(found[request.id].tokens) == alone(request)
    assert any(back), "nobody was put back with a prefix"


def states(engine: Engine) -> set[str]:
    sequences = [s for live in engine._live.values() for s in live]
    return {f"{s.status.value}{' in its prompt' * (0 < s.computed < s.given)}" for s in sequences}


@pytest.mark.parametrize("policy", ["mixed", "separate", "static"])
def test_whoever_leaves_takes_all_with_him(policy: str) -> None:
    """vLLM 10087, sglang 36552, lmdeploy 548: what was cancelled went on, and kept its blocks."""
    seen: set[str] = set()
    for steps in range(12):
        limits = Limits(tokens_per_step=7, sequences=3, policy=policy, static_batch=3)
        engine = engine_with(limits=limits)
        requests = [ask("a", n=3), ask("b"), Request("c", PROMPT, None, 3, ((1, 2), (3, 4)))]
        for request in requests:
            engine.add(request)
        for _ in range(steps):
            engine.step()
        seen |= states(engine)
        left = [request.id for request in requests if engine.abort(request.id)]
        ended = {u.id for u in engine.step() if u.result and u.result.finish_reason == "abort"}
        assert ended == set(left)
        assert engine.idle
        assert engine.usage == 0
        assert not engine.abort("a")
        assert list(engine.generate([ask("next")])[0].tokens) == alone(ask("next"))
    assert seen >= {"parked", "waiting", "running", "running in its prompt"}


def test_nobody_waits_for_those_who_came_later() -> None:
    """Ends come in the order of arrival, however many small requests keep coming behind."""
    engine = engine_with(blocks=12, limits=Limits(tokens_per_step=8, sequences=4))
    engine.add(ask("large", PROMPT[:17], 20))
    ended: list[str] = []
    for step in range(80):
        engine.add(ask(f"{step:03}", PROMPT[:5], 12))
        ended += [update.id for update in engine.step() if update.result is not None]
    assert "large" in ended[:20]
    small = [int(name) for name in ended if name != "large"]
    assert all(a < b for a, b in pairwise(small))
    assert engine.scheduler.preemptions > 0
