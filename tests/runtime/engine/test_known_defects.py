"""Defects of other small engines, each held away by a test named after it.

The prompts' blocks have 4 tokens; the numbers of the issues were of theirs.
"""

from collections import Counter

import pytest

from compress.errors import RequestError
from compress.runtime.engine.engine import Engine
from compress.runtime.sampling.sampling import sample
from compress.runtime.sequences.blocks import NULL, BlockPool, Cached
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request, RequestResult, Sampling
from helpers.engine.fake_decoder import FakeDecoder, alone, engine_with

PROMPT = tuple(i % 23 for i in range(3, 40, 3))


def ask(name: str, prompt: tuple[int, ...], most: int = 6, **options: object) -> Request:
    return Request(name, prompt, Sampling(max_tokens=most, **options))  # type: ignore[arg-type]


def drain(engine: Engine) -> dict[str, RequestResult]:
    results = {}
    while not engine.idle:
        for update in engine.step():
            if update.result is not None:
                results[update.id] = update.result
        engine.tables.check(engine.scheduler.running)
    return results


def test_1_preempted_sequence_hits_its_own_blocks_when_it_comes_back() -> None:
    """nano-vllm 211, 233: tokens were counted before the hit: an index out of range."""
    engine = engine_with()
    request = ask("a", PROMPT, 9)
    engine.add(request)
    for _ in range(6):
        engine.step()
    (sequence,) = engine.scheduler.running
    computed, before = sequence.computed, engine.stats.computed
    engine.scheduler.preempt(sequence)
    assert (sequence.computed, list(sequence.tables[0])) == (0, [])
    engine.step()
    assert engine.stats.computed - before == computed + 1 - computed // 4 * 4
    assert list(drain(engine)["a"].tokens) == alone(request)


@pytest.mark.parametrize("length", [4, 8, 12])
def test_2_prompt_of_whole_blocks_that_are_all_cached(length: int) -> None:
    """nano-vllm 144: nothing was left to compute, and a query of no length crashed."""
    engine = engine_with()
    for name in ("cold", "warm"):
        request = ask(name, PROMPT[:length])
        assert list(engine.generate([request])[0].tokens) == alone(request)
    assert engine.stats.hit == length - 4


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("steps", range(1, 7))
def test_3_recompute_after_preemption_at_a_block_edge(length: int, steps: int) -> None:
    """nano-vllm 217: after a preemption a token was not appended; one block too few at 257."""
    engine = engine_with(reuse=False)
    request = ask("a", PROMPT[:length], 7)
    engine.add(request)
    for _ in range(steps):
        engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    assert list(drain(engine)["a"].tokens) == alone(request)


def test_4_no_hit_on_blocks_of_the_same_step() -> None:
    """nano-vllm 208: a later sequence of a batch took blocks that were not computed yet."""
    engine = engine_with()
    requests = [ask(name, PROMPT) for name in "abc"]
    for request in requests:
        engine.add(request)
    engine.step()
    assert engine.stats.hit == 0
    assert engine.stats.computed == 3 * len(PROMPT)
    found = drain(engine)
    assert all(list(found[request.id].tokens) == alone(request) for request in requests)


def test_5_prompt_larger_than_the_pool_is_refused() -> None:
    """nano-vllm: an assertion in the scheduler ended the engine."""
    engine = engine_with(blocks=4)
    with pytest.raises(RequestError, match="18 positions need 5 blocks of 4: the cache has 4"):
        engine.add(ask("large", PROMPT, 6))
    request = ask("fits", PROMPT, 4)
    assert list(engine.generate([request])[0].tokens) == alone(request)


@pytest.mark.parametrize("policy", ["mixed", "separate", "static"])
def test_5_growing_sequences_that_fill_the_pool_all_end(policy: str) -> None:
    """nano-vllm: the last running sequence preempted itself, and nothing was left to schedule."""
    engine = engine_with(blocks=5, limits=Limits(policy=policy))
    requests = [ask(name, PROMPT[: 3 + i], 12) for i, name in enumerate("abcd")]
    results = engine.generate(requests)
    assert [list(result.tokens) for result in results] == [alone(r) for r in requests]


def test_6_several_end_ids_stop_strings_greedy_and_abort() -> None:
    """nano-vllm: one end id, no stop strings, no greedy decoding, no way to abort."""
    free = alone(ask("free", PROMPT, 20))
    for end in (free[2], free[5]):
        engine = engine_with(eos=(22, end) if 22 not in free else (end,))
        result = engine.generate([ask("a", PROMPT, 20)])[0]
        assert list(result.tokens) == free[: free.index(end) + 1]
        assert result.finish_reason == "stop"
    engine = engine_with(decode=lambda ids: "".join(chr(97 + i) for i in ids))
    text = "".join(chr(97 + i) for i in free)
    result = engine.generate([ask("a", PROMPT, 20, stop=(text[4:6],))])[0]
    assert (result.text, result.finish_reason) == (text[: text.index(text[4:6])], "stop")
    engine.add(ask("b", PROMPT, 20))
    engine.step()
    assert engine.abort("b")
    assert drain(engine)["b"].finish_reason == "abort"


def test_7_the_decoder_sees_as_few_rows_as_needed() -> None:
    """nano-vllm 245: an unexplained factor of 70. Steps and rows are counted, not timed."""
    decoder = FakeDecoder()
    engine = engine_with(decoder=decoder)
    engine.generate([ask(str(i), PROMPT[i:], 5) for i in range(8)])
    assert len(decoder.batches) == 5
    prompts = sum(len(PROMPT) - i for i in range(8))
    assert [batch.count for batch in decoder.batches] == [prompts, 8, 8, 8, 8]
    assert all(len(batch.rows) == 16 for batch in decoder.batches)


def test_8_what_is_too_long_has_a_reply() -> None:
    """mini-sglang: an over-long prompt was dropped with a line in the log, and no reply."""
    engine = engine_with()
    good = ask("good", PROMPT)
    results = engine.generate([ask("long", PROMPT * 8, 6), good])
    assert [result.finish_reason for result in results] == ["error", "length"]
    assert results[0].error == ("104 tokens of prompt and max_tokens 6 are 110: the model reads 96")
    assert list(results[1].tokens) == alone(good)


def test_9_options_are_served_or_refused() -> None:
    """mini-sglang: stop, n and penalties were accepted and ignored; each end was called "stop"."""
    engine = engine_with()
    results = engine.generate([ask("n", PROMPT, 3, n=3)])
    assert [result.index for result in results] == [0, 1, 2]
    assert [list(r.tokens) for r in results] == [alone(ask("n", PROMPT, 3), i) for i in range(3)]
    assert {result.finish_reason for result in results} == {"length"}
    plain = engine_with(sampler=sample)
    usual = plain.generate([ask("a", PROMPT, 30)])[0].tokens
    favourite = Counter(usual).most_common(1)[0][0]
    for options in ({"frequency_penalty": 2.0}, {"logit_bias": {favourite: -100}}):
        found = plain.generate([ask("a", PROMPT, 30, **options)])[0].tokens
        assert found.count(favourite) < usual.count(favourite)
    assert plain.generate([ask("a", PROMPT, 30, temperature=1.0)])[0].tokens != usual
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        engine.add(ask("other", PROMPT, 3, stop=("x",)))
    for options in ({"frequency_penalty": 2.5}, {"temperature": -1.0}, {"top_p": 0}, {"n": 0}):
        with pytest.raises(RequestError, match=next(iter(options))):
            engine.add(ask("other", PROMPT, 3, **options))


def test_10_eviction_touches_what_it_evicts_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """mini-sglang: each eviction walked the whole tree; its check of integrity was empty.

    What check() finds is in test_blocks.
    """
    pool = BlockPool(1001, 4)
    blocks = [pool.allocate() for _ in range(1000)]
    for block in blocks:
        pool.publish(block, Cached(b"%d" % block, b"", b""))
    pool.release(blocks)
    touched = []
    unlink = pool._unlink
    monkeypatch.setattr(pool, "_unlink", lambda block: (touched.append(block), unlink(block)))
    monkeypatch.setattr(pool, "_in_order", lambda: pytest.fail("the list is walked"))
    assert [pool.allocate() for _ in range(3)] == touched == blocks[:-4:-1]
    assert all(pool.find(Cached(b"%d" % block, b"", b"")) == NULL for block in touched)
    assert len(pool.by_key) == 997
