"""No work of a run is left out of its plan: each part has its time and its memory."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from compress.edits.work import Lessons, Work, forward_work, optimizer_work, training_work
from compress.plan.estimate import Estimate, estimate
from compress.plan.memory_needs import LESSONS, PROOF, QUANTIZING, TORCH_BYTES, WRITING, MemoryNeed
from compress.plan.plan import Plan
from compress.recipe.schema import Recipe
from compress.verbs import make_plan
from compress_exporters.gguf.proof_size import FP32, proof_bytes
from helpers.short_runs import RTN, SELF, recipe, text_source

BLOCKS = {"method": "k_quants", "type": "Q4_0"}
TRAINED = {"method": "distill", "tokens": 4096, "scope": "model", "optimizer": "muon", "batch": 2}


def into_file(**calibration: object) -> Recipe:
    return recipe(BLOCKS, calibration=calibration, output={"format": "gguf"})


def trained(tokens: int = 4096, **calibration: object) -> Recipe:
    return recipe({**TRAINED, "tokens": tokens}, calibration=calibration or SELF)


def seconds(plan: Plan) -> dict[str, float]:
    found = plan.estimate.to_json()["seconds_of_parts"]
    assert sum(found.values()) == pytest.approx(plan.estimate.seconds)
    assert min(found.values()) > 0
    return dict(found)


def needs(plan: Plan) -> dict[str, MemoryNeed]:
    return {need.part: need for need in plan.estimate.needs}


def test_the_proof_of_a_gguf_file_is_in_the_plan(tiny, tmp_path: Path) -> None:
    plan = make_plan(into_file(**text_source(tmp_path)), tiny("llama"))
    assert list(seconds(plan)) == [QUANTIZING, PROOF]
    proof = needs(plan)[PROOF]
    assert not proof.required  # where it does not fit, the file is proved by its form
    assert proof.bytes >= TORCH_BYTES + 2 * FP32 * plan.spec.all_numbers()


def test_its_memory_is_that_of_two_models(tiny) -> None:
    spec = make_plan(into_file(**SELF), tiny("llama")).spec
    largest = max(x.shape[0] * x.shape[1] for x in spec.all_linears())
    models = 2 * FP32 * spec.all_numbers()
    assert models < proof_bytes(spec) <= models + 4 * FP32 * largest


def test_an_export_to_gguf_is_proved_too(tiny) -> None:
    def planned(**export: object) -> Plan:
        return make_plan(recipe(RTN, export=[{"to": "gguf", **export}]), tiny("llama"))

    assert PROOF in needs(planned())
    assert PROOF not in needs(planned(verify=False))
    assert PROOF not in seconds(planned())  # as all of an export


def test_rounding_into_blocks_is_timed_by_their_own_search(tiny) -> None:
    run_size = make_plan(into_file(**SELF), tiny("llama")).run_size
    assert run_size.file is not None
    more = {kind: 100_000 * count for kind, count in run_size.file.rounded.items()}
    larger = replace(run_size, file=replace(run_size.file, rounded=more))
    assert time_of(larger, QUANTIZING) > 10 * time_of(run_size, QUANTIZING)


def time_of(run_size: object, part: str) -> float:
    found: Estimate = estimate(run_size)  # type: ignore[arg-type]  # a RunSize
    return dict(found.times)[part]


def test_text_for_an_edit_and_for_a_training_is_written(tiny, tmp_path: Path) -> None:
    """Of prune-60-distill with 50k tokens both texts took 125 of 212 s (docs/report.md)."""
    own = make_plan(trained(), tiny("llama"))
    assert list(seconds(own)) == [LESSONS, "distill"]
    assert needs(own)[LESSONS].bytes > TORCH_BYTES
    given = make_plan(trained(**text_source(tmp_path)), tiny("llama"))
    assert list(seconds(given)) == ["distill"]
    assert LESSONS not in needs(given)
    cut = {"method": "prune_width", "ffn": 0.5}
    assert list(seconds(make_plan(recipe(cut, calibration=SELF), tiny("llama")))) == [
        WRITING,
        "prune_width",
    ]


def test_rows_of_a_stage_are_written_once(tiny) -> None:
    both = {**TRAINED, "scope": ["block", "model"]}
    plan = make_plan(recipe(both, calibration=SELF), tiny("llama"))
    assert [name for name, _ in plan.estimate.times] == [LESSONS, "distill block", "distill model"]


def test_a_training_takes_time_with_its_tokens(tiny, tmp_path: Path) -> None:
    times = [
        seconds(make_plan(trained(tokens, **text_source(tmp_path)), tiny("llama")))["distill"]
        for tokens in (1 << 12, 1 << 16, 1 << 20)
    ]
    assert all(2 * less < more for less, more in pairwise(times))


def work_of(tiny, **options: object) -> Work:
    plan = make_plan(recipe({**TRAINED, **options}, calibration=SELF), tiny("llama"))
    (edit,) = plan.run_size.edits
    assert edit.work is not None
    return edit.work


def test_what_a_training_computes_is_counted(tiny) -> None:
    muon, adamw = work_of(tiny), work_of(tiny, optimizer="adamw")
    assert muon.wide > adamw.wide == 0
    assert muon.moved == adamw.moved > 0
    again = work_of(tiny, recompute=True)
    assert again.products > muon.products
    assert again.passages > muon.passages
    looked = work_of(tiny, every=1)
    assert looked.logits > muon.logits
    beside = work_of(tiny, cache=0)  # the teacher reads every step
    assert beside.passages > muon.passages


def test_works_add_up(tiny) -> None:
    model = make_plan(trained(), tiny("llama")).run_size.model
    blocks = len(model.spec.blocks)
    one = training_work(model, model, Lessons(100, 10, 7), head=True)
    assert one.passages == (3 * 100 + 10 + 7) * blocks
    assert one.logits == (100 + 10 + 7) * model.spec.vocab
    assert 2 * one == one + one
    assert forward_work(model, 20).passages == 20 * blocks
    steps = optimizer_work(64, [(4, 8), (8, 4)], steps=3)
    assert steps.wide == 3 * 2 * 5 * (4 * 4 * 4 * 8 + 2 * 4**3)
