"""`plan`, `run`, `compare`, `evaluate`, `export` and `open_model`, as `compress` exports them.

All are called alike: what is done, with which model, into which folder; then by name `options`, how
it is done, and `progress`, which is True for bars, or a function that gets each `compress.Event`.
A model is a folder, a hub id, a model of transformers in memory, or a pair of one and its
tokenizer. What the user can mend is raised as a CompressError, in one line and in the words of
Python.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from compress.api.exporting import export_model
from compress.api.in_memory import Model, checkpoint_of, source_of_run
from compress.api.options import ExportOptions
from compress.api.progress import Asked, listening
from compress.api.wording import python_words
from compress.artifacts.report import ArtifactReport
from compress.comparison import compare as comparing
from compress.comparison.options import CompareOptions
from compress.convert.report import ExportReport
from compress.evaluation.evaluate_checkpoint import EvaluationOptions, evaluate_checkpoint
from compress.machine.instruction_set import check_instruction_set
from compress.plan.plan import Plan
from compress.recipe import Recipe
from compress.report.comparison.records import Comparison
from compress.report.schema import Report
from compress.runs import run as runs
from compress.runs.options import RunOptions
from compress.runs.planning import make_plan
from compress.runtime.loading.model import Model as OpenModel
from compress.serve import open_model as serving

# A comparison goes on by its own options.
RESUMED_COMPARISON = "asked=CompareOptions(resume=True)"
P = ParamSpec("P")
T = TypeVar("T")


def _in_python(verb: Callable[P, T]) -> Callable[P, T]:
    """The verb with refusals in the words of Python, that of an instruction set first."""

    @wraps(verb)
    def worded(*args: P.args, **kwargs: P.kwargs) -> T:
        with python_words():
            check_instruction_set()
            return verb(*args, **kwargs)

    return worded


@_in_python
def plan(
    recipe: Recipe | str | Path,
    model: Model,
    out: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    options: RunOptions | None = None,
    memory: int | None = None,
) -> Plan:
    """What `run` would do, decided without any work: sizes, memory, time, and who loads the result.

    out: also look at the folder that the run would write, and at its disk. overrides: "key=value"
    settings of the recipe. memory: bytes of another machine, to plan for. What would stop the run
    is in the plan's `problems`.
    """
    with checkpoint_of(model) as source:
        return make_plan(
            recipe, source, overrides=overrides, options=options, out=out, memory=memory
        )


@_in_python
def run(
    recipe: Recipe | str | Path,
    model: Model,
    out: str | Path,
    *,
    overrides: Sequence[str] = (),
    options: RunOptions | None = None,
    progress: Asked = False,
) -> Report:
    """Compress a model as `recipe` says into the folder `out`, and report what that cost.

    recipe: a Recipe, a file, or the name of a built-in one. overrides: as in `plan`.
    """
    options = options or RunOptions()
    with source_of_run(model, out, options) as source, listening(progress) as listener:
        return runs.run(
            recipe, source, out, overrides=overrides, options=options, progress=listener
        )


def compare(
    models: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    recipes: Sequence[str | Path] = (),
    asked: CompareOptions | None = None,
    options: RunOptions | None = None,
    progress: Asked = False,
) -> Comparison:
    """Hold recipes against each other on one model, or finished results of one model.

    models: one model, or the folders of two results or more; paths, as a comparison keeps several
    results of its source. recipes: all built-in ones when left out, without those that train unless
    `asked` says so. asked: what for, and limits.
    """
    with python_words(RESUMED_COMPARISON), listening(progress) as listener:
        check_instruction_set()
        return comparing.compare(
            models, out, recipes=recipes, asked=asked, options=options, progress=listener
        )


@_in_python
def evaluate(
    model: Model,
    texts: Sequence[str] = (),
    out: str | Path | None = None,
    *,
    against: Model | None = None,
    options: EvaluationOptions | None = None,
    progress: Asked = False,
) -> Report:
    """Measure a model on texts (files, or "self") and on the tasks of `options`.

    against: its source, for perplexity before, KL and agreement. out: a new or empty folder for
    report.json and report.html.
    """
    asked = options or EvaluationOptions()
    asked = replace(asked, texts=(*texts, *asked.texts))
    with (
        checkpoint_of(model) as result,
        checkpoint_of(against) as source,
        listening(progress) as listener,
    ):
        return evaluate_checkpoint(result, asked, against=source, out=out, progress=listener)


@_in_python
def export(
    model: Model,
    to: str,
    out: str | Path | None = None,
    *,
    options: ExportOptions | None = None,
    progress: Asked = False,
) -> ExportReport | ArtifactReport:
    """Write a checkpoint in another format, or for another runtime; `to` is its name, as in
    `compress-model export --help`."""
    options = options or ExportOptions()
    with checkpoint_of(model) as source, listening(progress) as listener:
        return export_model(source, to, out, options, listener)


@_in_python
def open_model(model: Model, **how: Any) -> OpenModel:
    """A checkpoint, dense or compressed, that generates, streams and scores text.

    how: device, dtype, math, limits and cache, as in compress.serve.open_model.
    """
    with checkpoint_of(model) as source:
        return serving.open_model(source, **how)
