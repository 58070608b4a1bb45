"""What a run will need beside the weights, looked for before work starts: hours later is too late.

Texts and tasks that are there, a tokenizer that loads, lengths that fit the model, a transformers
class that runs its blocks, and memory for every part of the run.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from compress.artifacts.recipe_exports import check_artifact
from compress.checkpoint import Checkpoint, free_bytes
from compress.edits.distill import DistillConfig
from compress.errors import CompressError, DataError, OutputError, RecipeError
from compress.plan.memory_needs import sample_rows
from compress.plan.plan import Plan
from compress.plan.room import check_room
from compress.recipe import EditStage, Recipe
from compress.recipe.evaluation_config import DEFAULT_WINDOW_CAP
from compress.recipe.placing import placed
from compress.recipe.task_config import TaskConfig
from compress.report.units import two_sizes
from compress.runs.shared_text import check_copies
from compress.text.tokenizer import load_tokenizer
from compress_calibration.config import CalibrationConfig, SourceConfig
from compress_calibration.dataset import build
from compress_calibration.readers import source_files
from compress_calibration.sources import check_source

PLENTY = 16  # bytes of text a token asked for
QUICK_BYTES = 4 << 20
LEAST_ROWS = 2  # of a training: one is held out

Check = Callable[[], object]  # raises a CompressError for what it finds


def check_requirements(
    plan: Plan, checkpoint: Checkpoint, dtype: torch.dtype, device: str, *, drawn: bool = False
) -> None:
    """Raises DataError, RecipeError or CheckpointError for what would stop the run later.

    dtype, device: of the calibrated passes. drawn: the calibration text is there already, from the
    run that this one resumes.
    """
    for check in requirement_checks(plan, checkpoint, dtype, device, drawn=drawn):
        check()


def problems(checks: Iterable[Check]) -> tuple[str, ...]:
    """What the checks raise, as lines, each once."""
    found: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except CompressError as error:
            found[str(error)] = None
    return tuple(found)


def requirement_checks(
    plan: Plan, checkpoint: Checkpoint, dtype: torch.dtype, device: str, *, drawn: bool
) -> Iterator[Check]:
    """What `check_requirements` looks at, each by itself."""
    recipe, evaluation = plan.recipe, plan.recipe.evaluation
    calibration = recipe.calibration if plan.looks_at_data else None
    yield from _lengths(plan, calibration)
    yield from _trainings(plan, checkpoint)
    sources = list(_sources(recipe, calibration))
    for key, source in sources:
        yield partial(_placed, recipe, key, partial(check_source, source))
    for stage, _ in _distilled(recipe):
        yield partial(check_copies, recipe, stage, checkpoint)
    yield from _tasks(plan)
    prompts = evaluation is not None and bool(evaluation.samples.prompts or evaluation.tasks)
    if prompts or any(source.kind != "self" for _, source in sources):
        yield partial(load_tokenizer, checkpoint.small)
    if calibration is not None and not drawn:
        amount = partial(_check_amount, calibration, checkpoint, plan.spec.vocab)
        yield partial(_placed, recipe, "calibration", amount)
    if evaluation is not None or calibration is not None:
        yield partial(_check_class, plan)
    if dtype == torch.float16:
        yield partial(_check_latents, plan)
    yield from _artifacts(plan, checkpoint)
    if plan.run_size.measured is not None:
        yield partial(_check_scratch, plan, plan.run_size.measured)
    # What only the report needs and does not fit is left out of it, with a warning.
    yield partial(check_room, plan.run_size, replace(plan.room, drawn=drawn))
    own = calibration is not None and any(s.kind == "self" for s in calibration.sources)
    if calibration is not None and own and not drawn and plan.room.bytes is None:
        yield partial(_check_sampling, plan, calibration, dtype, device)


def _check_latents(plan: Plan) -> None:
    """Latents that an edit makes are of 1e-7 before their norm, which fp16 is too coarse for."""
    for each in plan.edits:
        after, before = (x.spec.blocks[0].sizes.latent for x in (each.result, each.source))
        if after is not None and before is None:
            raise RecipeError(
                f"dtype is fp16, too coarse for the latents that {each.label} makes; take bf16 or"
                " fp32"
            )


def _placed(recipe: Recipe, key: str, check: Check) -> None:
    with placed(recipe, key):
        check()


def _sources(
    recipe: Recipe, calibration: CalibrationConfig | None
) -> Iterator[tuple[str, SourceConfig]]:
    """Every text that is read, with its key in the recipe."""
    for stage, config in _distilled(recipe):
        for i, source in enumerate(config.sources or ()):
            yield f"{stage.label}.sources[{i}]", source
    if calibration is not None:
        for i, source in enumerate(calibration.sources):
            yield f"calibration.sources[{i}]", source
    if recipe.evaluation is not None:
        for i, text in enumerate(recipe.evaluation.texts):
            yield f"evaluation.texts[{i}]", text.source()


def _distilled(recipe: Recipe) -> Iterator[tuple[EditStage, DistillConfig]]:
    for stage in (*recipe.edits, *recipe.tuning):
        if isinstance(stage.config, DistillConfig):
            yield stage, stage.config


def _trainings(plan: Plan, checkpoint: Checkpoint) -> Iterator[Check]:
    """Something to train, rows that the model can read, two of them or more, and text enough for
    those."""
    recipe, context = plan.recipe, plan.spec.context
    yield partial(_check_changed, plan)
    for stage, config in _distilled(recipe):
        if config.length is not None:
            yield partial(_check_length, stage.at("length"), config.length, context)
        # Late: only runs that train load what trains.
        from compress.passes.training.setting import data_of

        data, skip = data_of(recipe, config, context)
        yield partial(_check_rows, stage.at("tokens"), config, data.length)
        amount = partial(_check_training_text, data, skip, checkpoint, plan.spec.vocab)
        yield partial(_placed, recipe, stage.label, amount)


def _check_changed(plan: Plan) -> None:
    """RecipeError for a training of what edits changed where that is nothing."""
    for each in plan.model.edits:
        stage = each.stage
        if stage is None or not isinstance(stage.config, DistillConfig):
            continue
        if stage.config.train == ("changed",) and not plan.model.student_of(each).changed:
            raise RecipeError(
                f"{stage.at('train')}: is changed, and no edit changes a tensor before it; set"
                " train: all, or put an edit before it"
            )


def _check_training_text(
    data: CalibrationConfig, skip: int, checkpoint: Checkpoint, vocab: int
) -> None:
    """skip: rows of the data that the calibration reads."""
    try:
        _check_amount(data, checkpoint, vocab, fewest=skip + LEAST_ROWS)
    except DataError as error:
        why = f"; {skip} of them are the calibration's: name sources of its own" if skip else ""
        raise DataError(f"{error}{why}") from None


def _check_rows(place: str, config: DistillConfig, length: int) -> None:
    if config.rows(length) < LEAST_ROWS:
        raise RecipeError(
            f"{place}: is {config.tokens}, one row of {length} tokens; training takes two or more,"
            f" so give {LEAST_ROWS * length} or more, or a shorter length"
        )


def _lengths(plan: Plan, calibration: CalibrationConfig | None) -> Iterator[Check]:
    """No row is longer than what the model can read."""
    recipe, context, evaluation = plan.recipe, plan.spec.context, plan.recipe.evaluation
    if calibration is not None:
        place = recipe.at("calibration.length")
        yield partial(_check_length, place, calibration.length, context)
    if evaluation is None:
        return
    resolve = partial(evaluation.resolve, context or DEFAULT_WINDOW_CAP)
    yield partial(_placed, recipe, "evaluation", resolve)
    for i, text in enumerate(evaluation.texts):
        if text.kind == "self":
            place = recipe.at(f"evaluation.texts[{i}].length")
            yield partial(_check_length, place, text.length, context)


def _artifacts(plan: Plan, checkpoint: Checkpoint) -> Iterator[Check]:
    """Targets that do not take the source as it is."""
    recipe, model = plan.recipe, plan.rounded
    # Told by names and shapes: what edits will make is not there yet.
    checkpoint = replace(checkpoint, config=dict(model.config), tensors=model.tensors)
    for i, config in enumerate(recipe.export):
        data = recipe.calibration is not None
        check = partial(check_artifact, config, checkpoint, plan.spec, calibrated=data)
        yield partial(_placed, recipe, f"export[{i}]", check)


def _tasks(plan: Plan) -> Iterator[Check]:
    """Their files, read whole, and settings that the model cannot follow."""
    recipe, evaluation = plan.recipe, plan.recipe.evaluation
    for i, task in enumerate(() if evaluation is None else evaluation.tasks):
        check = partial(_check_task, task, plan.spec.context or DEFAULT_WINDOW_CAP)
        yield partial(_placed, recipe, f"evaluation.tasks[{i}]", check)


def _check_task(task: TaskConfig, context: int) -> None:
    # Late: only runs with tasks load the engine.
    from compress.evaluation.tasks.asked import check_task

    check_task(task, context)


def _check_length(place: str, length: int, context: int) -> None:
    if context and length > context:
        raise RecipeError(
            f"{place}: is {length}, the model's context is {context} tokens; give {context} or less"
        )


def _check_amount(
    calibration: CalibrationConfig, checkpoint: Checkpoint, vocab: int, fewest: int | None = None
) -> None:
    """That files hold text enough, found by drawing it: where they are so small that it is quick,
    and larger ones hold enough. fewest: rows that do."""
    if any(source.kind not in ("text", "jsonl") for source in calibration.sources):
        return
    try:
        size = sum(p.stat().st_size for s in calibration.sources for p in source_files(s))
    except DataError:  # check_source says what is missing
        return
    asked = (fewest or calibration.samples) * calibration.length
    if size < min(PLENTY * asked, QUICK_BYTES):
        build(
            calibration, load_tokenizer(checkpoint.small), generate=None, vocab=vocab, fewest=fewest
        )


def _check_class(plan: Plan) -> None:
    # Late: a data-free run never loads transformers.
    from compress.blocks.skeleton import Skeleton

    models = {id(m): m for m in (plan.source, plan.rounded)}
    for model in models.values():
        Skeleton(dict(model.config), model.spec, dtype=torch.bfloat16)


def _check_scratch(plan: Plan, measured: CalibrationConfig) -> None:
    """The folder for temporary files has room for the hidden states of the measurement, twice."""
    folder = Path(tempfile.gettempdir())
    needed = 2 * measured.samples * measured.length * plan.spec.hidden * torch.float32.itemsize
    free = free_bytes(folder)
    if needed > free:
        needs, there = two_sizes(needed, free)
        raise OutputError(
            f"not enough disk space in {folder}: measuring the schemes needs {needs},"
            f" {there} are free; make room, or name another folder in TMPDIR"
        )


def _check_sampling(
    plan: Plan,
    calibration: CalibrationConfig,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Where the memory of blocks is not this process's own: a GPU's, or one that nobody knows."""
    from compress.blocks.sample import check_memory, sampling_bytes

    rows = sample_rows(plan.spec, dtype, calibration.samples, calibration.length)
    needed = sampling_bytes(plan.rounded.tensors, plan.spec, dtype, rows, calibration.length)
    check_memory(needed, device)
