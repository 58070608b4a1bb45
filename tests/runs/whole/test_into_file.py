"""Runs whose result is one GGUF file."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, CompressError, RecipeError
from compress.formats import open_weights
from compress.formats.weights import Weights
from compress.recipe import dump
from compress.recipe.reading.parse import parse
from compress.report.codec import read_json
from compress.runs.plain_rounding import ITSELF
from compress.verbs import ArtifactTarget, RunOptions, export_artifact, make_plan, run
from compress_exporters.exporter import Options
from compress_exporters.gguf import target
from helpers import tiny_models
from helpers.short_runs import RTN, kill_at_each_fifth, recipe, text_source

TYPE = "IQ4_NL"
BLOCKS = {"method": "k_quants", "type": TYPE}
FREE = {**BLOCKS, "compensate": False, "importance": False}
CUT = {"method": "prune_width", "ffn": 64}
# Every fortieth operation; all of them in the long set.
SOME = (
    pytest.param(7, 40, id="some"),
    *(pytest.param(i, 5, marks=pytest.mark.long) for i in range(5)),
)
TRAIN = {"method": "distill", "tokens": 256, "batch": 2, "length": 16, "every": 4}


@pytest.fixture(autouse=True)
def quick_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders have tests of their own; they take seconds."""
    monkeypatch.setattr(target, "has_llamacpp", lambda: False)
    monkeypatch.setattr(target, "has_accelerate", lambda: False)


def asked(folder: Path, *stages: Any, **rest: Any) -> Any:
    return recipe(*(stages or (BLOCKS,)), calibration=text_source(folder), **rest)


def result(out: Path) -> Weights:
    return open_weights(Checkpoint.open(out))


def test_a_folder_with_the_file_and_all_that_opens_it(tiny: Any, tmp_path: Path) -> None:
    model, data = tiny("llama"), text_source(tmp_path)
    texts = {"texts": [dict(each) for each in data["sources"]], "window": 16}
    planned = asked(tmp_path, output={"format": "gguf"}, evaluation=texts)
    report = run(planned, model, tmp_path / "out")
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found > {"model.gguf", "config.json", "tokenizer.json", "recipe.yaml", "report"}
    assert not {x for x in found if x.endswith(".safetensors")}
    weights = result(tmp_path / "out")
    kinds = {weights.stored_in(x.tensor) for x in weights.spec.linears()}
    assert kinds == {TYPE}
    done = [x for x in report.layers if x.skipped_reason is None]
    assert {(x.scheme, x.method.partition("+")[0]) for x in done} == {
        (TYPE, "k_quants"),
        ("Q8_0", "k_quants"),
    }
    assert report.result.format == "gguf"
    assert report.result.bytes == (tmp_path / "out" / "model.gguf").stat().st_size
    assert report.quality is not None
    (text,) = report.quality.texts
    assert text.plain is not None
    assert text.kl is not None
    assert text.plain.kl is not None
    assert text.kl < text.plain.kl
    assert [(x.target, x.proof) for x in report.exports] == [("gguf", "form")]
    assert sum(x.bytes_after for x in report.result.sizes) == report.result.bytes
    for program in ("llama-completion", "llama-cli", "llama-server"):
        assert any(line.startswith(f"{program} -m ") for line in report.open_with)
    assert read_json(tmp_path / "out" / "report" / "report.json").result == report.result


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "olmo2"])
def test_the_plan_knows_the_bytes(tiny: Any, tmp_path: Path, family: str) -> None:
    planned = asked(tmp_path)
    model = tiny(family)
    plan = make_plan(planned, model)
    assert plan.problems == ()
    report = run(planned, model, tmp_path / "out")
    assert plan.shards.total_bytes == report.result.bytes
    assert plan.bits_per_weight == pytest.approx(report.result.bits_per_weight)
    assert plan.format == "gguf"
    assert len(plan.compressed) == len([x for x in report.layers if x.skipped_reason is None])


def test_an_export_by_the_same_text_has_the_same_bytes(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    text = tmp_path / "long.txt"
    text.write_text("the old cat sat by the door and looked at the rain for a long time\n" * 2000)
    data = {"sources": [{"text": str(text)}]}
    run(recipe(BLOCKS, calibration=data), model, tmp_path / "run")
    how = ArtifactTarget("gguf", Options(type=TYPE, text=str(text)))
    export_artifact(model, how, tmp_path / "export", verify=False)
    one, other = (tmp_path / x / "model.gguf" for x in ("run", "export"))
    assert one.read_bytes() == other.read_bytes()


def test_without_data_it_is_plain_rounding(tiny: Any, tmp_path: Path) -> None:
    model, texts = tiny("gpt2"), {"texts": text_source(tmp_path)["sources"], "window": 16}
    report = run(recipe(FREE, evaluation=texts), model, tmp_path / "run")
    export_artifact(
        model, ArtifactTarget("gguf", Options(type=TYPE)), tmp_path / "export", verify=False
    )
    ours, wanted = result(tmp_path / "run"), Checkpoint.open(tmp_path / "run")
    assert report.quality is not None
    assert report.quality.plain_reason == ITSELF
    plain = tmp_path / "export" / "model.gguf"
    # llama.cpp gives some layers other types where nothing is known of what columns multiply.
    assert plain.stat().st_size == (tmp_path / "run" / "model.gguf").stat().st_size
    assert plain.read_bytes() == (tmp_path / "run" / "model.gguf").read_bytes()
    assert ours.checkpoint.files == wanted.files


@pytest.mark.parametrize(("first", "step"), SOME)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    tiny: Any, tmp_path: Path, first: int, step: int
) -> None:
    killed = kill_at_each_fifth(asked(tmp_path), tiny("llama"), tmp_path, first, step)
    assert killed


def test_it_may_stand_behind_edits_and_trainings(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama", dtype="fp32")
    report = run(asked(tmp_path, CUT, TRAIN, BLOCKS), model, tmp_path / "out")
    weights = result(tmp_path / "out")
    assert weights.spec.intermediate == 64
    assert [x.name for x in report.stages] == [
        *("prune_width", "distill block", "distill model", "quantize")
    ]
    assert weights.is_quantized("model.layers.1.mlp.down_proj")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["out", "words.txt"]


def test_a_recipe_is_written_as_it_was_read(tmp_path: Path) -> None:
    planned = asked(tmp_path, output={"format": "gguf"})
    assert parse(dump(planned)) == planned


def refused(planned: Any, model: Path) -> str:
    with pytest.raises(CompressError) as problem:
        make_plan(planned, model)
    assert isinstance(problem.value, RecipeError | CheckpointError)
    return str(problem.value)


def test_what_does_not_go_together_is_refused(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(RecipeError, match=r"k_quants rounds the whole model, and stages\[0\] is"):
        asked(tmp_path, RTN, BLOCKS)
    with pytest.raises(RecipeError, match="is a GGUF file, of which nothing is made; take it out"):
        asked(tmp_path, export=[{"to": "onnx"}])
    with pytest.raises(RecipeError, match="unknown key 'targets'"):
        asked(tmp_path, {**BLOCKS, "targets": ["*"]})
    with pytest.raises(RecipeError, match="type is 'Q9'; known are Q2_K, "):
        asked(tmp_path, {**BLOCKS, "type": "Q9"})
    assert refused(asked(tmp_path, output={"format": "dense"}), model).endswith(
        "output.format: is dense, and k_quants writes a GGUF file; use gguf or auto"
    )
    assert refused(asked(tmp_path, kv_cache="fp8"), model).endswith(
        "kv_cache: is 'fp8', and a GGUF file has no place for the scales of the cache; take it out"
    )
    with pytest.raises(RecipeError, match="'k_quants' needs calibration data"):
        recipe(BLOCKS)


def test_models_that_gguf_lacks_are_refused_before_work(tiny: Any, tmp_path: Path) -> None:
    message = refused(asked(tmp_path), tiny("opt"))
    assert "model type 'opt' has no architecture in GGUF that is known here" in message
    narrow = tiny("llama", hidden_size=48, num_attention_heads=4, head_dim=12, intermediate_size=48)
    assert "no weight has rows that are whole blocks of IQ4_NL" in refused(asked(tmp_path), narrow)
    run(recipe(RTN), tiny("llama"), tmp_path / "coded")
    assert "is already quantized" in refused(asked(tmp_path), tmp_path / "coded")


def test_experts_and_rows_that_change_places_are_the_sources(tiny: Any, tmp_path: Path) -> None:
    """What is read back is near what went in, wherever it lies in the file."""
    model = tiny_models.make("mixtral", tmp_path / "model", dtype="fp32")
    run(asked(tmp_path, {**BLOCKS, "type": "Q8_0"}), model, tmp_path / "out")
    before, after = open_weights(Checkpoint.open(model)), result(tmp_path / "out")
    for linear in before.spec.all_linears():
        was, now = before.read(linear.tensor).float(), after.read(linear.tensor).float()
        assert float((was - now).norm() / was.norm()) < 0.02
    assert torch.isfinite(after.read(before.spec.embedding)).all()


def test_a_resumed_run_says_where_it_goes_on(tiny: Any, tmp_path: Path, monkeypatch: Any) -> None:
    from compress.runs.whole import into_file

    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    planned, model, told = asked(tmp_path), tiny("llama"), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(into_file, "_write", stops)
        with pytest.raises(KeyboardInterrupt):
            run(planned, model, tmp_path / "out")
    run(
        planned,
        model,
        tmp_path / "out",
        options=RunOptions(resume=True),
        progress=lambda event: told.append(event.line if hasattr(event, "line") else str(event)),
    )
    assert any("quantize goes on behind head" in line for line in told)
    assert not any("block 1 (" in line for line in told)
