"""The plan is what then happens; inspect and eval say what is there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compress.errors import OutputError
from compress.report.codec import read_json
from compress.verbs import (
    EvaluationOptions,
    Event,
    evaluate_checkpoint,
    inspect_checkpoint,
    make_plan,
    plan_table,
    run,
)
from helpers.short_runs import GPTQ, RTN, SELF, WORDS, recipe, text_source


@pytest.mark.parametrize("fmt", ["auto", "dense"])
@pytest.mark.parametrize("shard", ["5GB", "60KB"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_planned_bytes_are_the_bytes(
    tiny, tmp_path: Path, family: str, shard: str, fmt: str
) -> None:
    asked = recipe(RTN, output={"shard_size": shard, "format": fmt})
    plan = make_plan(asked, tiny(family))
    report = run(asked, tiny(family), tmp_path / "out")
    written = {p.name: p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors")}
    assert plan.to_json()["shards"] == written
    assert report.result.bytes == sum(written.values()) == plan.shards.total_bytes
    assert sum(part.bytes_after for part in report.result.sizes) == report.result.bytes
    source = sum(p.stat().st_size for p in tiny(family).glob("*.safetensors"))
    assert sum(part.bytes_before for part in report.result.sizes) == source
    assert plan.source_bytes == report.source.bytes == source
    assert inspect_checkpoint(tmp_path / "out")["bytes"] == report.result.bytes


def test_the_plan_names_every_linear(tiny) -> None:
    plan = make_plan(recipe(GPTQ, calibration=SELF), tiny("mixtral"))
    facts = json.loads(json.dumps(plan.to_json()))
    named = {m["name"] for m in facts["modules"]} | {s["name"] for s in facts["skipped"]}
    assert named == {x.name for x in plan.spec.all_linears()}
    reasons = {s["name"]: s["reason"] for s in facts["skipped"]}
    assert reasons["lm_head"] == "ignored by 'lm_head' in stages[0].ignore"
    assert "router" in reasons["model.layers.0.block_sparse_moe.gate"]
    assert facts["tensor_parallel"].keys() == {"2", "4", "8"}
    assert any("heads" in line for line in facts["tensor_parallel"]["8"])
    assert {r["runtime"] for r in facts["runtimes"]} >= {"transformers", "vLLM on GPU"}
    table = plan_table(plan)
    assert f"({plan.shards.total_bytes} bytes in 1 file)" in table
    assert "ignored by 'lm_head'" in table


def test_the_plan_layer_by_layer(tiny) -> None:
    plan = make_plan(recipe({**RTN, "ignore": ["up_proj", "gate_proj", "lm_head"]}), tiny("llama"))
    assert "compress-model plan with --modules" in plan_table(plan)
    table = plan_table(plan, modules=True)
    assert "--modules" not in table
    lines = {line.split()[0]: line.split() for line in table.splitlines() if line}
    assert [name for name in lines if name in {x.name for x in plan.spec.all_linears()}] == [
        x.name for x in plan.spec.all_linears()
    ]
    assert lines["model.layers.1.mlp.down_proj"] == [
        *("model.layers.1.mlp.down_proj", "64", "x", "96", "rtn", "int4", "sym", "g32"),
        *("12288", str(64 * 96 // 2 + 64 * 3 * 2 + 16)),  # codes, scales, shape
    ]
    left = "lm_head 256 x 64 left ignored by 'lm_head' in stages[0].ignore"
    assert " ".join(lines["lm_head"]) == left
    counted = [int(cells[-1]) for name, cells in lines.items() if "rtn" in cells]
    assert sum(counted) == sum(m.bytes_after for m in plan.modules)


def test_planning_touches_nothing(tiny, tmp_path: Path) -> None:
    before = sorted(p.name for p in tiny("llama").iterdir())
    make_plan(recipe(RTN), tiny("llama"))
    assert sorted(p.name for p in tiny("llama").iterdir()) == before


def test_progress_counts_up_to_the_total(tiny, tmp_path: Path) -> None:
    events: list[Event] = []
    asked = recipe(GPTQ, calibration=text_source(tmp_path))
    run(asked, tiny("llama"), tmp_path / "out", progress=events.append)
    steps = [(e.unit, e.index, e.total) for e in events if e.stage == "quantize"]
    assert steps == [
        ("tensors outside the blocks", 1, 4),
        ("embedded tokens", 2, 4),
        ("block 0", 3, 4),
        ("block 1", 4, 4),
    ]
    assert [e.stage for e in events][:3] == ["device", "check", "calibrate"]
    assert all(e.seconds >= 0 for e in events)


def test_the_report_is_written_and_read_back(tiny, tmp_path: Path) -> None:
    words = tmp_path / "held-out.txt"
    words.write_text(WORDS * 3)
    asked = recipe(
        GPTQ,
        calibration=text_source(tmp_path),
        evaluation={
            "texts": [{"text": str(words), "name": "words"}, {"kind": "self", "length": 32,
                      "samples": 2, "name": "own"}],
            "samples": {"prompts": ["once upon"], "tokens": 4},
        },
    )  # fmt: skip
    report = run(asked, tiny("llama"), tmp_path / "out")
    assert read_json(tmp_path / "out" / "report" / "report.json") == report
    page = (tmp_path / "out" / "report" / "report.html").read_text()
    assert "model.layers.1.mlp.down_proj" in page
    assert report.quality is not None
    assert [text.name for text in report.quality.texts] == ["words", "own"]
    for text in report.quality.texts:
        assert text.ppl_source is not None
        assert text.kl is not None
        assert 0 < text.kl < 0.1
        assert text.ppl_result == pytest.approx(text.ppl_source, rel=0.2)
    assert len(report.samples) == 1
    assert [stage.name for stage in report.stages] == ["quantize", "evaluate"]
    assert report.calibration is not None
    assert len(report.calibration["sha256"]) == 64
    assert not (tmp_path / "out" / "evaluation").exists()
    assert not (tmp_path / "out" / "journal.json").exists()


def test_evaluating_a_result_against_its_source(tiny, tmp_path: Path) -> None:
    words = tmp_path / "held-out.txt"
    words.write_text(WORDS * 2)
    made = run(recipe({**RTN, "ignore": []}), tiny("llama"), tmp_path / "out")
    report = evaluate_checkpoint(
        tmp_path / "out",
        EvaluationOptions(texts=[str(words)]),
        against=tiny("llama"),
        out=tmp_path / "report",
    )
    assert report.quality is not None
    (text,) = report.quality.texts
    assert text.name == "held-out"
    assert text.kl is not None
    assert report.result.bits_per_weight == pytest.approx(made.result.bits_per_weight)
    assert report.result.params == made.result.params
    assert report.result.bytes == made.result.bytes
    assert report.result.format == "compressed-tensors"
    assert read_json(tmp_path / "report" / "report.json") == report
    alone = evaluate_checkpoint(tiny("llama"), EvaluationOptions(texts=[str(words)]))
    assert alone.quality is not None
    assert alone.quality.texts[0].ppl_result == pytest.approx(text.ppl_source)
    assert alone.result.bits_per_weight == 16
    with pytest.raises(OutputError, match="is not an empty folder"):
        evaluate_checkpoint(
            tiny("llama"), EvaluationOptions(texts=[str(words)]), out=tmp_path / "report"
        )


def test_seeds_decide_what_a_model_writes(tiny, tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        report = run(recipe(GPTQ, calibration=SELF, seed=seed), tiny("llama"), tmp_path / name)
        assert report.calibration is not None
        weights = torch.from_numpy(
            load_file(tmp_path / name / "model.safetensors")[
                "model.layers.1.mlp.down_proj.weight_packed"
            ].numpy()
        )
        found.append((report.calibration["sha256"], weights))
    assert found[0][0] == found[1][0] != found[2][0]
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][1], found[2][1])
