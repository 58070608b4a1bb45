"""From written tensors to a checkpoint: headers, the small files, and a look at what is there."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from compress.checkpoint import Checkpoint, ShardWriter, write_atomic
from compress.errors import OutputError
from compress.formats.validate import Expected, validate
from compress.passes import outliers
from compress.plan.plan import Plan
from compress.recipe import dump
from compress.runs.card import config_files, model_card
from compress.version import VERSION


def finish_between(
    writer: ShardWriter, earlier: Iterable[str], files: Mapping[str, bytes], source: Checkpoint
) -> None:
    """Make a checkpoint of what a pass before the last wrote; may be repeated after a kill.

    earlier: tensors that were written before this process began. source: of the run, whose side
    files go along. files: config.json and what goes with it, by name.
    """
    writer.finish(earlier)
    _carry(source, writer.folder)
    for name, content in files.items():
        write_atomic(writer.folder / name, content)


def finish_beside(plan: Plan, folder: Path, source: Checkpoint) -> None:
    """Tokenizer, config.json, recipe and card of a result; may be repeated after a kill."""
    _carry(source, folder)
    for name, content in config_files(plan).items():
        write_atomic(folder / name, content)
    write_atomic(folder / "recipe.yaml", dump(plan.recipe).encode())
    card = model_card(plan, source.path.resolve().name, VERSION)
    write_atomic(folder / "README.md", card)


def finish_result(
    plan: Plan, writer: ShardWriter, earlier: Iterable[str], source: Checkpoint
) -> None:
    """The same of what the last pass wrote, with the recipe and a card; and hold it to the plan."""
    partial, earlier = writer.folder, list(earlier)
    writer.finish(earlier)
    outliers.join(plan, partial)
    finish_beside(plan, partial, source)
    _check(plan, partial, resumed=bool(earlier))


def _carry(source: Checkpoint, folder: Path) -> None:
    """Tokenizer, chat template, licence and so on."""
    for path in source.side_files():
        write_atomic(folder / path.name, source.small.read(path.name))


def _check(plan: Plan, partial: Path, *, resumed: bool) -> None:
    """Every tensor is there, as it was or as the parts that were planned, and no other."""
    model = plan.rounded
    expected = Expected(
        source=model.tensors,
        spec=plan.spec,
        schemes={m.linear.tensor: m.scheme for m in plan.modules},
        fmt=plan.format,
        with_g_idx=frozenset(m.linear.tensor for m in plan.modules if m.g_idx),
        kv_cache=plan.kv_cache,
        kv_dtype=model.main_dtype,
    )
    problems = validate(Checkpoint.open(partial), expected)
    if problems and resumed:
        raise OutputError(
            f"{partial} was changed while the run was stopped: {'; '.join(problems[:5])}; remove it"
            " and start again"
        )
    assert not problems, f"{partial} is not what was planned: {'; '.join(problems[:5])}"
