"""From written tensors to a checkpoint: headers, the small files, and a look at what is there."""

from collections.abc import Collection
from pathlib import Path

from compress.checkpoint import Checkpoint, write_atomic
from compress.errors import OutputError
from compress.formats.validate import Expected, validate
from compress.passes import outliers
from compress.passes.context import PassContext
from compress.passes.quantize import stream
from compress.recipe import dump
from compress.runs.card import config_files, model_card
from compress.version import VERSION


def finish_files(work: PassContext, partial: Path, earlier: Collection[str]) -> None:
    """Seal the weights and put the small files beside them; may be repeated after a kill.

    earlier: units that the journal had when this process began.
    """
    units = stream.units(work)
    assert {unit for unit, _, _ in units} <= work.journal.units.keys(), "a unit was not recorded"
    before = [name for unit, _, names in units if unit in earlier for name in names]
    work.writer.finish(entry[0] for name in before for entry in work.plan.tensors[name])
    outliers.join(work.plan, partial)
    for path in work.checkpoint.side_files():
        write_atomic(partial / path.name, work.checkpoint.small.read(path.name))
    files = config_files(work.plan, work.checkpoint.config, work.checkpoint.shapes)
    for name, content in files.items():
        write_atomic(partial / name, content)
    write_atomic(partial / "recipe.yaml", dump(work.plan.recipe).encode())
    card = model_card(work.plan, work.checkpoint.path.resolve().name, VERSION)
    write_atomic(partial / "README.md", card)
    _check(work, partial, resumed=bool(before))


def _check(work: PassContext, partial: Path, *, resumed: bool) -> None:
    """Every source tensor is there, as it was or as the parts that were planned, and no other."""
    modules = work.plan.modules
    expected = Expected(
        source=work.checkpoint.tensors,
        spec=work.plan.spec,
        schemes={m.linear.tensor: m.scheme for m in modules},
        fmt=work.plan.format,
        with_g_idx=frozenset(m.linear.tensor for m in modules if m.g_idx),
        kv_cache=work.plan.kv_cache,
        kv_dtype=work.checkpoint.main_dtype,
    )
    problems = validate(Checkpoint.open(partial), expected)
    if problems and resumed:
        raise OutputError(
            f"{partial} was changed while the run was stopped: {'; '.join(problems[:5])}; remove it"
            " and start again"
        )
    assert not problems, f"{partial} is not what was planned: {'; '.join(problems[:5])}"
