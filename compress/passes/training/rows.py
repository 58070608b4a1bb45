"""The rows that a pass trains on: drawn once, kept in OUT.partial for a resumed run to see."""

from functools import partial
from typing import Any

from safetensors.torch import save

from compress.blocks.author import Author
from compress.checkpoint.output.folder import write_atomic
from compress.distill.rows import TokenRows, all_rows, split
from compress.errors import DataError
from compress.passes import calibration_tokens
from compress.passes.context import record_unit
from compress.passes.ranks import decided
from compress.passes.structure.files import WORKING
from compress.passes.structure.tokens import skeleton_of
from compress.passes.training.setting import TrainingPass, data_of
from compress.passes.training.units import ROWS, ROWS_FILE
from compress.plan.training.data import held_rows
from compress_calibration.dataset import digest


def rows_of(each: TrainingPass) -> tuple[TokenRows, TokenRows]:
    """Rows to train on, and rows to measure on; drawn where no pass of the stage has drawn them."""
    work = each.work
    if ROWS not in work.journal.units:
        record_unit(work, ROWS, decided(work.ranks, partial(_drawn, each)))
    drawn = work.journal.units[ROWS]
    ids, mask = calibration_tokens.reload(each.folder, drawn["sha256"], f"{WORKING}/{ROWS_FILE}")
    return split(all_rows(ids, mask), held_rows(len(ids)), each.seed)


def _drawn(each: TrainingPass) -> dict[str, Any]:
    work, recipe = each.work, each.work.plan.recipe
    stage = each.planned.name.split(".")[:2]
    for name, part in work.journal.journal.passes.items():
        if name.split(".")[:2] == stage and ROWS in part.units:
            return dict(part.units[ROWS])
    data, skip = data_of(recipe, each.config, each.source.spec.context)
    author = Author(each.source, partial(skeleton_of, work, each.source), work.kept)
    tokens = calibration_tokens.built(data, author, work.progress, fewest=skip)
    ids = tokens.ids[skip:].contiguous()
    mask = None if tokens.mask is None else tokens.mask[skip:].contiguous()
    if len(ids) < 2:
        raise DataError(
            f"the texts hold {len(ids)} rows of {data.length} tokens behind those of the"
            " calibration; training takes 2 or more: add text, or name sources of its own"
        )
    stored = {"ids": ids} | ({} if mask is None else {"mask": mask})
    write_atomic(each.working / ROWS_FILE, save(stored))
    summary = tokens.summary.to_json()
    count = ids.numel() if mask is None else int(mask.sum())
    return {**summary, "samples": len(ids), "tokens": count, "sha256": digest(ids, mask)}
