"""Tasks in recipes and in `eval`: read before work, asked of both models, in the report."""

import gc
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compress.errors import CheckpointError, DataError, RecipeError
from compress.events import Event
from compress.plan.probes import MachineRates
from compress.recipe import dump
from compress.recipe.reading.parse import parse
from compress.recipe.task_config import TaskConfig
from compress.report.codec import read_json
from compress.runtime.loading import room
from compress.serve import open_model as models
from compress.verbs import (
    EvaluationOptions,
    evaluate_checkpoint,
    make_plan,
    open_model,
    plan_table,
    run,
)
from helpers.short_runs import RTN, WORDS, recipe

CHOICES = [
    {"query": "once upon a time", "choices": ["there was a dog", "rain", "the old cat"], "gold": 0},
    {"query": "the girl found a red stone", "choices": ["and gave it", "park park"], "gold": 1},
    {"query": " ".join([WORDS] * 9), "choices": ["the end", "a park"], "gold": 1},
]
ENDS = [{"context": "once upon a", "continuation": "time"}] * 3
SUMS = [{"context": "two and two", "answer": "4"}] * 2


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def choices(tmp_path: Path) -> Path:
    return write(tmp_path / "choices.jsonl", CHOICES)


@pytest.fixture
def ends(tmp_path: Path) -> Path:
    return write(tmp_path / "ends.jsonl", ENDS)


def test_a_recipe_with_tasks(tiny, tmp_path: Path, choices: Path, ends: Path) -> None:
    sums = write(tmp_path / "sums.jsonl", SUMS)
    tasks = [str(choices), {"path": str(ends), "max_items": 2}, {"path": str(sums), "name": "add"}]
    asked = recipe(RTN, evaluation={"tasks": tasks})
    plan = make_plan(asked, tiny("llama"))
    assert plan.problems == ()
    assert "measures choices (3 items), ends (2 items), add (2 items)" in plan_table(plan)
    events: list[Event] = []
    report = run(asked, tiny("llama"), tmp_path / "out", progress=events.append)
    assert read_json(tmp_path / "out" / "report" / "report.json") == report
    assert report.quality is not None
    assert report.quality.texts == ()
    found = report.quality.tasks
    assert [(name, task.kind, task.items) for name, task in sorted(found.items())] == [
        ("add", "generation", 2),
        ("choices", "multiple_choice", 3),
        ("ends", "continuation", 2),
    ]
    assert set(found["choices"].numbers) == {"acc", "acc_norm"}
    assert found["choices"].truncated == 1
    for task in found.values():
        assert task.same_answers is not None
        for number in task.numbers.values():
            assert None not in (number.source, number.source_error, number.difference_error)
    assert found["add"].settings == {
        "prompt": "Question: {context}\nAnswer:",
        "max_tokens": 64,
        "stop": ["Question:"],
        "answer": "number",
        "dtype": "fp32",
    }
    assert [stage.name for stage in report.stages] == ["quantize", "evaluate"]
    notes = [event.message for event in events if event.stage == "evaluate" and not event.total]
    assert notes[0].startswith("7 items of 3 tasks, ")
    assert [e.stage for e in events if e.unit == "answers" and e.index == e.total] == [
        "ask source",
        "ask result",
    ]
    again = parse(dump(asked))
    assert again.evaluation == asked.evaluation


def test_numbers_are_those_of_each_model_alone(tiny, tmp_path: Path, ends: Path) -> None:
    """With a source its numbers stand beside, and perplexity is that of Model.score."""
    source = tiny("llama", dtype="fp32")
    run(recipe(RTN), source, tmp_path / "out")
    both = evaluate_checkpoint(
        tmp_path / "out", EvaluationOptions(tasks=[str(ends)]), against=source
    )
    sides = [
        evaluate_checkpoint(folder, EvaluationOptions(tasks=[str(ends)]))
        for folder in (source, tmp_path / "out")
    ]
    assert both.quality is not None
    found = both.quality.tasks["ends"].numbers["perplexity"]
    alone = []
    for report, folder in zip(sides, (source, tmp_path / "out"), strict=True):
        assert report.quality is not None
        task = report.quality.tasks["ends"]
        assert task.same_answers is None
        number = task.numbers["perplexity"]
        assert number.source is number.difference_error is None
        (score,) = open_model(folder, math="exact").score("once upon a", [" time"])
        assert score.score is not None
        assert number.result == pytest.approx(2.718281828459045**-score.score)
        alone.append(number.result)
    assert [found.source, found.result] == alone
    assert found.source != found.result


def test_eval_takes_files_and_mappings(tiny, tmp_path: Path, choices: Path, ends: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(choices, other)
    tasks = [
        str(choices),
        str(other / choices.name),
        f"{{path: {ends}, name: last, delimiter: '', max_items: 1}}",
    ]
    out = tmp_path / "report"
    report = evaluate_checkpoint(
        tiny("llama"), EvaluationOptions(tasks=tasks, max_items=2), out=out
    )
    assert report.quality is not None
    items = {name: task.items for name, task in report.quality.tasks.items()}
    assert items == {f"{tmp_path.name}/choices": 2, "other/choices": 2, "last": 1}
    assert read_json(out / "report.json") == report
    assert "acc_norm" in (out / "report.html").read_text()
    assert "ends.jsonl" in report.recipe.text


OPTIONS = [
    ("{path: 3", "--task {path: 3: not valid YAML: "),
    ("{paht: x}", "--task {paht: x}: task.paht: unknown key 'paht'; allowed: name, path, kind, "),
    ("{kind: partial}", "--task {kind: partial}: task: required key 'path' is missing; it takes"),
    ("{path: x, max_items: 0}", "--task {path: x, max_items: 0}: task.max_items: evaluation task"),
    ("{path: [x]}", "--task {path: [x]}: task.path: is a list; it takes a .jsonl file"),
    ("", "--task : task: is ''; it takes a file or a mapping {path: FILE, ...}"),
]


@pytest.mark.parametrize(("option", "message"), OPTIONS, ids=range(len(OPTIONS)))
def test_mistakes_on_the_command_line(option: str, message: str, tiny) -> None:
    with pytest.raises(RecipeError) as caught:
        evaluate_checkpoint(tiny("llama"), EvaluationOptions(tasks=[option]))
    assert str(caught.value).startswith(message)


def test_names_of_tasks_differ(tiny, choices: Path) -> None:
    with pytest.raises(RecipeError, match="--task: two tasks are named 'a'; give one another name"):
        evaluate_checkpoint(
            tiny("llama"), EvaluationOptions(tasks=[f"{{path: {choices}, name: a}}"] * 2)
        )
    twice = {"tasks": [{"path": str(choices), "name": "a"} for _ in range(2)]}
    with pytest.raises(RecipeError, match="two tasks are named 'a'; names must differ"):
        recipe(RTN, evaluation=twice)


def test_something_is_measured_on(tiny) -> None:
    with pytest.raises(DataError, match="there is nothing to measure on: give a text or a task"):
        evaluate_checkpoint(tiny("llama"), EvaluationOptions())


def test_recipes_place_what_is_wrong(tiny, tmp_path: Path, choices: Path) -> None:
    """In the recipe where it is its own, else when a run begins, before any work."""
    text = (
        "name: x\nstages: [{method: rtn, scheme: W4A16, group_size: 32}]\nevaluation:\n  tasks:\n"
    )
    with pytest.raises(RecipeError, match=r"r.yaml:5: evaluation.tasks\[0\].kind: is 'choice'; al"):
        parse(f"{text}    - {{path: x, kind: choice}}\n", label="r.yaml")
    with pytest.raises(RecipeError, match=r"r.yaml:5: evaluation.tasks\[0\]: is a list; it takes"):
        parse(f"{text}    - [x]\n", label="r.yaml")
    relative = parse(f"{text}    - choices.jsonl\n", label="r.yaml", folder=tmp_path)
    assert relative.evaluation is not None
    assert relative.evaluation.tasks == (TaskConfig("choices", str(choices)),)
    assert make_plan(relative, tiny("llama")).problems == ()
    gone = parse(f"{text}    - gone.jsonl\n", label="r.yaml", folder=tmp_path)
    with pytest.raises(DataError, match=r"r.yaml:5: evaluation.tasks\[0\]: .*gone.jsonl: there is"):
        run(gone, tiny("llama"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    choices.write_text("{}\n")
    (problem,) = make_plan(relative, tiny("llama")).problems
    assert problem.startswith(f"r.yaml:5: evaluation.tasks[0]: {choices}:1 has the fields none; a")


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No memory for an engine."""
    monkeypatch.setattr(room, "available_bytes", lambda: 1000)
    return


@pytest.mark.usefixtures("crowded")
def test_what_does_not_fit_is_left_out_of_a_run(tiny, tmp_path: Path, choices: Path) -> None:
    text = {"self": True, "samples": 2, "length": 16}
    asked = recipe(RTN, evaluation={"tasks": [str(choices)], "texts": [text]})
    report = run(asked, tiny("llama"), tmp_path / "out")
    line = next(
        w for w in report.warnings if w.startswith("evaluation task 'choices' was left out")
    )
    assert "GiB of memory as torch.float32" in line
    assert report.quality is not None
    assert report.quality.tasks == {}
    assert len(report.quality.texts) == 1
    with pytest.raises(DataError, match=r"^evaluation task 'choices': .* of memory as"):
        evaluate_checkpoint(tmp_path / "out", EvaluationOptions(tasks=[str(choices)]))


def test_what_one_should_know_of_the_engine_is_said(tiny, ends: Path) -> None:
    events: list[Event] = []
    report = evaluate_checkpoint(
        tiny("granite"), EvaluationOptions(tasks=[str(ends)]), progress=events.append
    )
    assert report.quality is not None
    (notice,) = report.quality.tasks["ends"].settings["notices"]
    assert notice.startswith("transformers computes here, one text at a time: ")
    assert notice in [event.message for event in events]


def test_one_model_is_in_memory_at_a_time(
    tiny, monkeypatch: pytest.MonkeyPatch, ends: Path
) -> None:
    """The source's is gone when the result's is opened."""
    alive: list[weakref.ref[object]] = []
    whole = models.model_of

    def watched(*arguments: Any) -> Any:
        assert [reference() for reference in alive] == [None] * len(alive)
        model = whole(*arguments)
        decoder = model.engine.runner.decoder
        alive.append(weakref.ref(getattr(decoder, "decoder", decoder).embedding.values))
        del decoder
        return model

    monkeypatch.setattr(models, "model_of", watched)
    gc.disable()
    try:
        evaluate_checkpoint(
            tiny("llama"), EvaluationOptions(tasks=[str(ends)]), against=tiny("llama")
        )
    finally:
        gc.enable()
    assert len(alive) == 2


def test_another_tokenizer_is_refused(tiny, tmp_path: Path, choices: Path) -> None:
    source, other = tiny("llama"), tmp_path / "other"
    shutil.copytree(source, other)
    held = json.loads((other / "tokenizer.json").read_text())
    vocab = held["model"]["vocab"]
    held["model"]["vocab"] = dict(zip(vocab, reversed(vocab.values()), strict=True))
    (other / "tokenizer.json").write_text(json.dumps(held))
    with pytest.raises(CheckpointError, match=r"differ: token \d+ of task 'choices' is \["):
        evaluate_checkpoint(source, EvaluationOptions(tasks=[str(choices)]), against=other)


def test_long_tasks_say_how_long(tiny, monkeypatch: pytest.MonkeyPatch, choices: Path) -> None:
    from compress.evaluation import cost
    from compress.plan import probes

    monkeypatch.setattr(
        probes, "measure_rates", lambda dtype: MachineRates(1e5, 1e5, 1e5, 1e5, 1e9)
    )
    events: list[Event] = []
    evaluate_checkpoint(
        tiny("llama"),
        EvaluationOptions(tasks=[str(choices)], device="cpu"),
        progress=events.append,
    )
    line = next(e.message for e in events if not e.total)
    assert line.startswith("3 items of 1 task, ")
    assert line.endswith(f" on this processor; {cost.FEWER_ITEMS}")
