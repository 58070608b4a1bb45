"""What it takes to choose what an open edit cuts, counted before: the models that are tried."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from compress.blocks.live import live_bytes
from compress.checkpoint.outline import Outline
from compress.edits.hybrid import HybridConfig, able_layers
from compress.edits.hybrid import count_of as global_count
from compress.edits.memory import Between, learned_bytes
from compress.edits.mla import MlaConfig
from compress.edits.prune_depth import PruneDepthConfig, count_of
from compress.edits.work import Work, forward_work, head_products, learned_work
from compress.plan.memory_needs import LIVE_HEADS, LIVE_LOGITS
from compress.plan.row_counts import EDIT_ROWS_PER_HELD, chain_rows, chunk_rows
from compress.plan.search.sizes import GRID, SizeSpace
from compress_calibration.config import CalibrationConfig

ROWS = 16  # that a trial of sizes fits on
MEASURED = 8  # rows that it is measured on, at most
TOGETHER = 6  # combinations that are measured
SWAPS = 2  # blocks that are tried in place of the last one that goes
STORE = 64 << 20  # bytes of one store of states; a larger one is a file


@dataclass(frozen=True, slots=True, eq=False)
class Choosing:
    """What is measured before a pass, all at most.

    model: that the pass reads. given: that the run was given, which it is measured by. fitted,
    measured: tokens that a trial of sizes fits on, and tokens that losses are of. batch: of the
    former those that go through a block together. trials: of sizes.
    removals: blocks that go one by one, each time the one that the loss misses least. changes: of
    each step the number of layers that are changed one by one. walks: of the model beside. stores:
    of states of measured tokens that are there at once.
    """

    model: Outline
    given: Outline
    fitted: int
    measured: int
    batch: int = 0
    trials: int = 0
    removals: int = 0
    changes: tuple[int, ...] = ()
    walks: int = 1
    stores: int = 2


def sizes_choosing(space: SizeSpace, given: Outline, data: CalibrationConfig) -> Choosing:
    """Of an open `prune`; known losses cost nothing, but nobody knows which will be known."""
    held = max(1, data.samples // EDIT_ROWS_PER_HELD)
    rows, whole = min(ROWS, max(1, data.samples - held)), len(space.source.spec.blocks)
    kept = [whole if x is None else len(x) for x in map(space.first_blocks, space.points)]
    gone = min(whole - min(kept) + SWAPS, whole - 1) if min(kept) < whole else 0
    alone = sum(min(GRID, len(values)) - 1 for values in space.axes.values())
    together = min(TOGETHER, len(space.points)) + (SWAPS if gone else 0)
    return Choosing(
        space.source,
        given,
        rows * data.length,
        min(MEASURED, held) * data.length,
        batch=chain_rows(given.spec, rows, data.length, data.spill_bytes) * data.length,
        trials=alone + together,
        removals=gone,
        stores=2 + (whole if gone else 0),
    )


def blocks_choosing(
    model: Outline, given: Outline, config: PruneDepthConfig, data: CalibrationConfig
) -> Choosing:
    """Of an open `prune_depth`."""
    whole = len(model.spec.blocks)
    measured = max(1, data.samples // EDIT_ROWS_PER_HELD) * data.length
    gone = whole - count_of(model, config)
    if not gone:
        return Choosing(model, given, 0, 0, walks=0, stores=0)
    if config.by == "loss":
        return Choosing(model, given, 0, measured, removals=gone, stores=2 + whole)
    return Choosing(model, given, 0, measured, stores=2 + (gone if config.by == "angular" else 1))


def windows_choosing(
    model: Outline, given: Outline, config: HybridConfig, data: CalibrationConfig
) -> Choosing:
    """Of an open `hybrid`."""
    able = len(able_layers(model))
    steps = able - global_count(model, config)
    changes = range(able, able - (1 if config.by == "alone" else steps), -1)
    measured = max(1, data.samples // EDIT_ROWS_PER_HELD) * data.length
    return Choosing(model, given, 0, measured, changes=tuple(changes), stores=2 + able)


def latents_choosing(
    model: Outline, given: Outline, config: MlaConfig, data: CalibrationConfig
) -> Choosing:
    """Of an `mla` of which the frequencies alone are open."""
    return splits_choosing(model, given, 1, data)


def splits_choosing(
    model: Outline, given: Outline, tried: int, data: CalibrationConfig
) -> Choosing:
    """Of so many splits of the budget of an `mla`, behind a walk that looks at frequencies."""
    held = max(1, data.samples // EDIT_ROWS_PER_HELD)
    rows = min(ROWS, max(1, data.samples - held))
    return Choosing(
        model,
        given,
        rows * data.length,
        min(MEASURED, held) * data.length,
        batch=chain_rows(given.spec, rows, data.length, data.spill_bytes) * data.length,
        trials=tried if tried > 1 else 0,
    )


# Open edits but `prune`, whose sizes are a space of their own.
CHOOSING: Mapping[str, Callable[[Outline, Outline, Any, CalibrationConfig], Choosing]] = (
    MappingProxyType(
        {"prune_depth": blocks_choosing, "hybrid": windows_choosing, "mla": latents_choosing}
    )
)


def choosing_work(choosing: Choosing) -> Work:
    """Of all of it."""
    model, tokens = choosing.model, choosing.measured
    forward = forward_work(model, tokens)
    head = Work(head_products(model.spec, tokens), logits=1.0 * tokens * model.spec.vocab)
    blocks = len(model.spec.blocks)
    work = choosing.walks * (forward + forward_work(choosing.given, tokens))
    for left in range(blocks, blocks - choosing.removals, -1):
        work += left * (left + 1) / (2 * blocks) * forward + (left + 2) * head
    for tried in choosing.changes:
        work += (1 + tried / 2) * forward + (tried + 2) * head
    if not choosing.trials:
        return work
    return work + choosing.trials * (learned_work(model, choosing.fitted) + forward + 2 * head)


def choosing_bytes(choosing: Choosing, dtype: torch.dtype) -> int:
    """Most bytes of memory: stores, and a block with its work or the heads."""
    spec = choosing.model.spec
    between = Between(choosing.given, choosing.model, choosing.model, is_open=True)
    trial = learned_bytes(between, dtype, choosing.batch) if choosing.trials else 0
    walk = live_bytes(spec, choosing.measured, dtype.itemsize)
    rows = min(chunk_rows(spec.vocab), choosing.measured)
    heads = 4 * spec.vocab * (LIVE_HEADS * spec.hidden + LIVE_LOGITS * rows)
    held = sum(min(STORE, store) for store in _stores(choosing, dtype))
    return held + max(trial, walk, heads)


def choosing_files(choosing: Choosing, dtype: torch.dtype) -> int:
    """Bytes of the stores that are too large for memory."""
    return sum(store for store in _stores(choosing, dtype) if store > STORE)


def _stores(choosing: Choosing, dtype: torch.dtype) -> Sequence[int]:
    """Bytes of every store that is there at once: of trials two of each chain."""
    width = dtype.itemsize
    wide = max(choosing.model.spec.hidden, choosing.given.spec.hidden) * width
    fitted = [choosing.fitted * wide] * (4 if choosing.trials else 0)
    return [*fitted, *([choosing.measured * wide] * choosing.stores)]
