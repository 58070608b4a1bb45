"""Tasks of an evaluation, put to the source and then to the result, a whole model at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from compress.errors import CompressError, DataError
from compress.evaluation.compared import Compared
from compress.evaluation.workspace import Workspace
from compress.events import Progress, by_tenths, note
from compress.formats import Weights
from compress.recipe.evaluation_config import EvaluationConfig
from compress.recipe.task_config import TaskConfig
from compress.report.records.quality import TaskNumber, TaskQuality
from compress.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from compress.evaluation.tasks.asked import Task
    from compress.evaluation.tasks.numbers import TaskOutcome
    from compress.runtime.loading.model import Model

LEFT_OUT = " was left out"
# Texts at once: more made tale-6m's outputs a tenth faster and its cache twice as large.
SEQUENCES = 32


@dataclass(frozen=True, slots=True)
class TasksMeasured:
    """tasks: by name. left_out: a line about each that cannot be had."""

    tasks: Mapping[str, TaskQuality] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def read_tasks(
    config: EvaluationConfig, tokenizer: Tokenizer | None, models: Sequence[Weights]
) -> tuple[list["Task"], tuple[str, ...]]:
    """The tasks that can be asked, for what all of the models read; a line about each other one."""
    # Late: a data-free run without tasks never loads the engine.
    from compress.evaluation.tasks.asked import read_task
    from compress.runtime.loading.open_engine import UNKNOWN_CONTEXT

    context = min(model.spec.context or UNKNOWN_CONTEXT for model in models)
    tasks, left_out = [], []
    for task in config.tasks:
        assert tokenizer is not None, "tasks are text"
        try:
            tasks.append(read_task(task, tokenizer, context, bos=config.bos))
        except DataError as error:
            left_out.append(_left_out(task, error))
    return tasks, tuple(left_out)


def measure_tasks(
    tasks: Sequence["Task"],
    sides: Compared,
    tokenizer: Tokenizer | None,
    config: EvaluationConfig,
    work: Workspace,
) -> TasksMeasured:
    """Every task on the source, where there is one, and on the result.

    A model that does not fit into the memory, or that the engine cannot run, leaves all tasks out:
    half of a comparison would be none.
    """
    if not tasks:
        return TasksMeasured()
    assert tokenizer is not None, "tasks are text"
    outcomes: dict[str, list[TaskOutcome]] = {}
    notices: dict[str, None] = {}
    try:
        for label, weights in (("source", sides.source), ("result", sides.result)):
            if weights is not None:
                model = _open(weights, tokenizer, config, work.device)
                notices |= dict.fromkeys(model.notices)
                outcomes[label] = _outcomes(tasks, model, label, work.progress)
                # Freed before the next one is read.
                del model
    except CompressError as error:
        return TasksMeasured({}, tuple(_left_out(task.config, error) for task in tasks))
    for notice in notices:
        work.progress(note("evaluate", notice))
    settings = {"dtype": config.dtype, **({"notices": list(notices)} if notices else {})}
    before = outcomes.get("source", [None] * len(tasks))
    found = zip(tasks, before, outcomes["result"], strict=True)
    return TasksMeasured({t.config.name: _quality(t, a, b, settings) for t, a, b in found})


def _open(weights: Weights, tokenizer: Tokenizer, config: EvaluationConfig, device: str) -> "Model":
    from compress.evaluation.stream import DTYPES
    from compress.runtime.loading.open_engine import Opening
    from compress.runtime.sequences.limits import Limits
    from compress.serve.open_model import model_of

    limits = Limits(sequences=SEQUENCES)
    how = Opening(dtype=DTYPES[config.dtype], device=device, limits=limits)
    return model_of(weights, tokenizer, how)


def _outcomes(
    tasks: Sequence["Task"], model: "Model", label: str, progress: Progress
) -> list["TaskOutcome"]:
    """Counted over all tasks together."""
    from compress.evaluation.tasks.run import run_task

    total, done = sum(len(task.pairs) for task in tasks), count(1)
    tell = by_tenths(progress, f"ask {label}", "answers")
    return [run_task(task, model, lambda: tell(next(done), total)) for task in tasks]


def _quality(
    task: "Task",
    source: "TaskOutcome | None",
    result: "TaskOutcome",
    settings: Mapping[str, object],
) -> TaskQuality:
    from compress.evaluation.tasks.numbers import agreement

    return TaskQuality(
        kind=task.kind,
        items=len(task.items),
        truncated=task.truncated,
        numbers={metric: _number(metric, source, result) for metric in result.values},
        same_answers=None if source is None else agreement(source, result),
        settings={**task.settings, **settings},
    )


def _number(metric: str, source: "TaskOutcome | None", result: "TaskOutcome") -> TaskNumber:
    from compress.evaluation.tasks.numbers import difference, number

    after = number(metric, result.values[metric])
    if source is None:
        return TaskNumber(after.value, after.error)
    before = number(metric, source.values[metric])
    moved = difference(metric, source.values[metric], result.values[metric])
    return TaskNumber(after.value, after.error, before.value, before.error, moved.error)


def _left_out(task: TaskConfig, error: CompressError) -> str:
    return f"{task.label}{LEFT_OUT}: {str(error).removeprefix(f'{task.label}: ')}"
