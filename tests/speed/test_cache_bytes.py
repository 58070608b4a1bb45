"""What a text is said to take in the cache, held to the blocks that the engine gives out."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.inspect.facts import result_of
from compress.inspect.inspect import inspect_checkpoint
from compress.inspect.table import inspect_table
from compress.report.html import render_html
from compress.report.summary import windowed_contexts
from compress.report.terminal.table import render_table
from compress.runtime.decoder.kv import KVCache
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request, Sampling
from compress.speed.products import workload_of
from compress.speed.setting import SpeedSetting, SpeedTexts
from compress.verbs import make_plan, measure_speed, plan_table, run, speed_table
from helpers import tiny_models
from helpers.short_runs import recipe

CONTEXT, WINDOW = 32, 7


@dataclass(frozen=True, slots=True)
class Case:
    """token: numbers that one leaves in both layers. windowed: of them in a layer with a window."""

    family: str
    token: int
    sizes: dict[str, Any]
    windowed: int = 0

    def numbers(self, length: int) -> int:
        """Of a text of so many tokens."""
        behind = max(0, length - WINDOW)
        return length * self.token - behind * self.windowed


CASES = {
    "mha": Case("llama", 2 * 2 * 4 * 16, {"num_key_value_heads": 4}),
    "gqa": Case("llama", 2 * 2 * 2 * 16, {}),
    "latent": Case("deepseek_v3", 2 * (32 + 8), {}),
    "hybrid": Case("ministral", 2 * 2 * 2 * 16, {"sliding_window": WINDOW}, 2 * 2 * 16),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def checkpoint(case: Case, folder: Path) -> Path:
    sizes = {"max_position_embeddings": CONTEXT, **case.sizes}
    return tiny_models.make(case.family, folder, dtype="fp32", **sizes)


def held(folder: Path, length: int, stored: torch.dtype, block_size: int) -> int:
    """Bytes of the blocks that a text of so many tokens holds at once at most, read one by one."""
    opening = Opening(
        limits=Limits(long_prefill=1), block_size=block_size, cache_tokens=CONTEXT, kv_dtype=stored
    )
    engine, _ = open_engine(open_weights(Checkpoint.open(folder)), opening)
    # The last token is chosen, and leaves nothing.
    engine.generate([Request("0", (3, 5, 7), Sampling(max_tokens=length - 2, ignore_eos=True))])
    assert isinstance(engine.runner, LocalRunner)
    assert isinstance(engine.runner.cache, KVCache)
    assert engine.stats.running == 1
    return engine.runner.cache.nbytes(engine.stats.held)


@EACH
def test_a_text_holds_what_the_formula_says(case: Case, tmp_path: Path) -> None:
    """Exactly, in blocks of one token; in larger ones a block at either end of what is seen."""
    folder = checkpoint(case, tmp_path)
    weights = open_weights(Checkpoint.open(folder))
    for stored, length in ((torch.float32, CONTEXT - 1), (torch.bfloat16, 5)):
        work = workload_of(weights, dtype=torch.float32, kv_dtype=stored)
        assert work.kv_bytes(length) == stored.itemsize * case.numbers(length)
        assert held(folder, length, stored, 1) == work.kv_bytes(length)
        most = work.kv_bytes(length) + 2 * 3 * work.kv_bytes_per_token
        assert work.kv_bytes(length) <= held(folder, length, stored, 4) <= most


@EACH
def test_all_who_tell_it_agree(case: Case, tmp_path: Path) -> None:
    """inspect, the facts of a report, and roofline's work."""
    folder = checkpoint(case, tmp_path)
    weights = open_weights(Checkpoint.open(folder))
    want = 4 * case.token, 4 * case.numbers(CONTEXT)
    facts, told = inspect_checkpoint(folder), result_of(weights)
    assert (facts["kv_bytes_per_token"], facts["kv_bytes_of_context"]) == want
    assert (told.kv_bytes_per_token, told.kv_bytes_of_context) == want
    assert told.context == CONTEXT
    work = workload_of(weights, dtype=torch.float32)
    assert (work.kv_bytes_per_token, work.kv_bytes(CONTEXT)) == want
    shown = "a context of 32: some layers have windows" in inspect_table(facts)
    assert shown == bool(case.windowed)


@pytest.mark.usefixtures("answered_here")
def test_a_hybrid_is_said_to_take_less_before_and_after(tiny: Any, tmp_path: Path) -> None:
    """2 blocks of 2 heads of 16: 128 numbers of 2 bytes a token, half of them seen by a window."""
    source = tiny("llama")
    asked = recipe({"method": "hybrid", "window": 32, "keep": [0]})
    plan = make_plan(asked, source)
    whole, less = 128 * 256, 128 * 128 + 32 * 128
    facts = plan.to_json()
    assert (facts["context"], facts["source_kv_bytes_of_context"]) == (128, whole)
    assert facts["result_kv_bytes_of_context"] == less
    assert "cache    256 B -> 256 B a token, 32.8 kB -> 20.5 kB a context of 128" in (
        plan_table(plan)
    )
    report = run(asked, source, tmp_path / "out")
    assert (report.source.kv_bytes_of_context, report.result.kv_bytes_of_context) == (whole, less)
    assert re.search(r"windows +32\.8 kB +20\.5 kB +a context of 128", render_table(report))
    assert "20.5\xa0kB a context of 128" in render_html(report)
    assert "256 B of KV cache a token, 20.5 kB a context" in (
        (tmp_path / "out" / "README.md").read_text()
    )


def test_a_bench_has_the_blocks_beside_the_formula(tmp_path: Path) -> None:
    """A prompt is read in one step, so that a layer with a window holds all of it for a while."""
    folder = checkpoint(CASES["hybrid"], tmp_path)
    texts = SpeedTexts(batches=(2,), prompt=16, output=9)
    facts = measure_speed(folder, texts, place=SpeedSetting(kv_dtype="bf16"))
    told = facts["checkpoint"]["kv_bytes_of_text"]
    assert told == {str(n): 2 * CASES["hybrid"].numbers(n) for n in (25, CONTEXT)}
    found = facts["measured"][0]["cache_bytes"]
    assert found["expected"] == 2 * told["25"]
    # All layers see two blocks of 16, behind the prompt those with a window as well.
    assert found["measured"] == 2 * 2 * 32 * CASES["hybrid"].token
    assert "cache of 2 texts: 16.4 kB (8.19 kB) in blocks at once" in speed_table(facts)
    assert "a text 4.10 kB of 25, 4.99 kB of 32; room" in speed_table(facts)


@pytest.mark.usefixtures("answered_here")
def test_windows_that_stay_are_on_the_page_and_no_change_in_the_terminal(
    tiny: Any, tmp_path: Path
) -> None:
    source = tiny("mistral", sliding_window=32)
    report = run(
        recipe({"method": "rtn", "scheme": "W4A16", "group_size": 16}), source, tmp_path / "o"
    )
    whole = report.source.kv_bytes_of_context
    assert whole == report.result.kv_bytes_of_context
    assert windowed_contexts(report) == (whole, whole)
    assert "KV cache" not in render_table(report)
