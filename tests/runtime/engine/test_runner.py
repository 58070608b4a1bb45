"""The boundary of a step: what computes may sit elsewhere, with nothing but inputs and outputs."""

import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.runtime.decoder.one_call import OneCallDecoder
from compress.runtime.engine.batch import TextChunk, build_batch
from compress.runtime.engine.interfaces import StepInput, StepLayout, StepRunner
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.runtime.sampling import head
from compress.runtime.sequences.request import Request, Sampling
from helpers import tiny_models
from helpers.engine import decoder_schedules, schedules
from helpers.engine.fake_decoder import VOCABULARY, FakeDecoder, engine_with
from helpers.engine.flat_runs import load
from helpers.engine.one_by_one import OneByOne


class Elsewhere:
    """A runner in a thread of its own: bytes go there and bytes come back."""

    def __init__(self, runner: StepRunner) -> None:
        self.asked: SimpleQueue[bytes | None] = SimpleQueue()
        self.found: SimpleQueue[bytes] = SimpleQueue()
        self.layout: StepLayout = pickle.loads(pickle.dumps(runner.layout))
        self.thread = Thread(target=self._serve, args=(runner,), daemon=True)
        self.thread.start()

    def run(self, step: StepInput) -> Iterator[Tensor]:
        self.asked.put(pickle.dumps(step))
        found = pickle.loads(self.found.get())
        if isinstance(found, BaseException):
            raise found
        return iter(found)

    def close(self) -> None:
        self.asked.put(None)
        self.thread.join()

    def _serve(self, runner: StepRunner) -> None:
        while (asked := self.asked.get()) is not None:
            found: Any
            try:
                found = list(runner.run(pickle.loads(asked)))
            except ValueError as error:
                found = error
            self.found.put(pickle.dumps(found))


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Elsewhere]]:
    """Makes what LocalRunner makes, in threads that end with the test."""
    made: list[Elsewhere] = []

    def make(*parts: Any) -> Elsewhere:
        made.append(Elsewhere(LocalRunner(*parts)))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@pytest.mark.parametrize("seed", range(3))
def test_lives_of_a_real_decoder_elsewhere(
    seed: int,
    decoder: OneByOne,
    elsewhere: Callable[..., Elsewhere],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefixes, forks, copies, preemption, scores: bit by bit those of one request at a time."""
    monkeypatch.setattr(decoder_schedules, "LocalRunner", elsewhere)
    engine = decoder_schedules.play(decoder, decoder_schedules.pool_of(tiny_models.VOCAB), seed)
    assert isinstance(engine.runner, Elsewhere)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> OneByOne:
    folder = tiny_models.make(
        "gemma3_text", tmp_path_factory.mktemp("model"), dtype="fp32", sliding_window=12
    )
    return OneByOne(load(folder), decoder_schedules.LONGEST)


def test_lives_of_the_books_elsewhere(
    elsewhere: Callable[..., Elsewhere], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(decoder: FakeDecoder, batch: object, cache: object) -> Tensor:
        return FakeDecoder.forward(decoder, batch, cache)

    # It looks into the engine while that waits, which no other process could.
    monkeypatch.setattr(schedules.Watched, "forward", look)
    monkeypatch.setattr(schedules, "LocalRunner", elsewhere)
    for seed in range(3):
        schedule = schedules.draw(seed)
        results, engine = schedules.run(schedule)
        schedules.check_results(schedule, results)
        assert isinstance(engine.runner, Elsewhere)


def test_an_error_comes_back(elsewhere: Callable[..., Elsewhere]) -> None:
    """And nothing is lost: the next step begins anew."""
    requests = [Request("a", (1, 2, 3), Sampling(max_tokens=5))]
    (want,) = engine_with().generate(requests)
    failing = FakeDecoder(fail=ValueError("no memory"))
    engine = engine_with(decoder=failing)
    inner = engine.runner
    assert isinstance(inner, LocalRunner)
    engine.runner = elsewhere(inner.decoder, inner.cache)
    engine.add(requests[0])
    with pytest.raises(ValueError, match="no memory"):
        engine.step()
    assert engine.usage == 0
    updates = []
    while not engine.idle:
        updates += engine.step()
    assert tuple(token for update in updates for token in update.tokens) == want.tokens


def test_without_its_runner_an_engine_holds_no_weight(tmp_path: Path) -> None:
    """Nor a cache: what it knows of the model are facts."""
    weights = open_weights(Checkpoint.open(tiny_models.make("llama", tmp_path)))
    engine, _ = open_engine(weights, Opening(cache_tokens=64))
    inner = engine.runner
    assert isinstance(inner, LocalRunner)
    called = inner.decoder
    plain = called.decoder if isinstance(called, OneCallDecoder) else called
    held = [weakref.ref(plain.embedding.values), weakref.ref(inner.cache)]
    engine.runner = engine_with().runner
    del inner, called, plain
    gc.collect()
    assert [reference() for reference in held] == [None, None]
    assert engine.facts.variant(5) == 0


class Seen:
    """A runner that counts the rows of logits that were there at once."""

    def __init__(self, inner: StepRunner) -> None:
        self.inner, self.layout = inner, inner.layout
        self.most = 0

    def run(self, step: StepInput) -> Iterator[Tensor]:
        for some in self.inner.run(step):
            self.most = max(self.most, len(some))
            yield some


def test_logits_come_as_many_rows_at_a_time_as_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOGITS_BYTES", 4 * VOCABULARY * 16)
    request = Request("a", tuple(i % VOCABULARY for i in range(60)), score_from=1)
    engine = engine_with()
    engine.runner = seen = Seen(engine.runner)
    (found,) = engine.generate([request])
    monkeypatch.undo()
    (want,) = engine_with().generate([request])
    assert seen.most == 16
    assert (found.tokens, found.score) == (want.tokens, want.score)


def test_a_batch_of_two_chunks() -> None:
    """What a decoder is given, number by number: rows are filled up to four."""
    batch = build_batch(
        [TextChunk((5, 6), 3, 5, ([2, 7],), 9), TextChunk([8], 0, 0, ([4],), 1)], 4, 4
    )
    assert batch.ids.tolist() == [5, 6, 8, 0]
    assert batch.positions.tolist() == [3, 4, 0, 0]
    assert batch.sequence.tolist() == [0, 0, 1, 2]
    (table,), (slots,) = batch.tables, batch.slots
    assert table.tolist() == [[2, 7], [4, 0], [0, 0]]
    assert slots.tolist() == [2 * 4 + 3, 7 * 4, 4 * 4, 0]
    assert batch.rows.tolist() == [2, 0, 0, 0]
    assert (batch.count, batch.multiple, batch.lengths.tolist()) == (3, 4, [9, 1, 0])
    assert {x.dtype for x in (batch.ids, batch.positions, batch.rows, batch.lengths, slots)} == {
        torch.int64
    }
    assert {table.dtype, batch.sequence.dtype} == {torch.int32}
