"""The engine's benchmark: its load is what it says, both sides give every token asked for."""

from pathlib import Path

import pytest
import torch

from benchmarks.runtime.kv_quality import logprobs, loss
from benchmarks.runtime.load import make_load
from benchmarks.runtime.sides import Ours, Static
from benchmarks.runtime.speed import ALIKE, MADE, merged
from benchmarks.runtime.timings import Timings, summary
from compress.speed.load import LoadRequest
from helpers import tiny_models
from helpers.engine.flat_runs import load


def test_lengths_are_log_uniform() -> None:
    jobs = make_load(2000, 100)
    for lengths in ([len(job.prompt) for job in jobs], [job.output for job in jobs]):
        assert (min(lengths), max(lengths)) == (16, 256)
        middle = sum(length <= 64 for length in lengths) / len(lengths)
        assert abs(middle - 0.5) < 0.05
    assert make_load(2000, 100) == jobs
    assert all(0 < token < 100 for job in jobs[:10] for token in job.prompt)


def test_a_summary_says_when_tokens_came() -> None:
    found = summary([Timings([[1.0, 2.0, 4.0], [2.0]], cpu_s=2.0)])
    assert found["tokens_per_s"] == 1.0
    assert found["tokens_per_cpu_s"] == 2.0
    assert (found["ttft_p50_s"], found["ttft_p99_s"]) == (1.0, 2.0)
    assert (found["inter_token_p50_s"], found["inter_token_p99_s"]) == (1.0, 2.0)


@pytest.mark.parametrize("side", [Ours, Static])
def test_each_side_gives_every_token(side: type[Ours | Static], tmp_path: Path) -> None:
    model = tiny_models.make("llama", tmp_path, dtype="fp32")
    jobs = [LoadRequest(tuple(range(1, 4 + i)), 2 + i) for i in range(9)]
    times = side(model, torch.float32).serve(jobs).tokens
    assert [len(of) for of in times] == [job.output for job in jobs]
    assert all(of == sorted(of) for of in times)


def test_loads_of_one_machine_are_one_result() -> None:
    how = {**dict.fromkeys(ALIKE, "a"), **dict.fromkeys(MADE, "first")}
    later = {**how, **dict.fromkeys(MADE, "later")}
    result = merged(None, how, {"requests": 64, "engine": 1})
    result = merged(result, how, {"requests": 8, "engine": 2})
    result = merged(result, later, {"requests": 64, "engine": 3})
    cases = [(case["requests"], case["engine"], case["date"]) for case in result["cases"]]
    assert cases == [(8, 2, "first"), (64, 3, "later")]
    assert result["date"] == "later"
    other = merged(result, {**later, "cpu": "b"}, {"requests": 1})
    assert [case["requests"] for case in other["cases"]] == [1]


def test_eight_bits_cost_something_and_not_much(tmp_path: Path) -> None:
    decoder = load(tiny_models.make("llama", tmp_path, dtype="fp32"))
    texts = [list(range(1, 40))]
    exact = [logprobs(decoder, text, torch.float32) for text in texts]
    assert exact[0].shape == (38, tiny_models.VOCAB)
    assert 0 < loss(decoder, texts, exact, torch.int8)["kl_mean"] < 1e-3
