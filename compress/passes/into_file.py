"""The pass that rounds a whole model into one file: weight by weight into blocks, which lie in a
file of their own until all are there."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from compress.artifacts.rounding.block_file import BlockFile
from compress.artifacts.rounding.prepare import RoundingTokens, block_rounding, chain_of
from compress.artifacts.rounding.walk import (
    BlockRounding,
    RoundedTensor,
    Unit,
    round_alone,
    round_along,
    units,
)
from compress.blocks.author import Author
from compress.blocks.skeleton import Skeleton
from compress.blocks.walk import Chain
from compress.events import Event, Progress
from compress.formats import Weights
from compress.methods.k_quants import KQuantsConfig
from compress.passes import calibration_tokens
from compress.passes.context import record_unit
from compress.passes.journal import CALIBRATION, PassJournal
from compress.passes.ranks import ONE_RANK, Ranks
from compress.passes.units import shown
from compress.plan.plan import Plan
from compress.plan.whole.file import BlocksPlan
from compress.report.schema import Layer
from compress.usercache.cache import UserCache
from compress_exporters.gguf.plan import ToRound


@dataclass(frozen=True, slots=True, eq=False)
class FilePass:
    """weights: of the model that is rounded. to_round: what of them. folder: OUT.partial. dtype,
    device: of the blocks. kept: where text of the model's own lies."""

    plan: Plan
    weights: Weights
    to_round: ToRound
    journal: PassJournal
    folder: Path
    progress: Progress
    dtype: torch.dtype
    device: str
    kept: UserCache | None = None

    @property
    def ranks(self) -> Ranks:
        return ONE_RANK


def round_model(work: FilePass) -> BlockFile:
    """Round what the journal does not have as rounded; returns the file of all rows."""
    config = work.plan.recipe.stages[0].config
    assert isinstance(config, KQuantsConfig), "no other method rounds whole models"
    rounding = block_rounding(work.weights, work.to_round, work.folder, config, work.device)
    names, done = units(work.plan.spec), work.journal.units
    if set(names) <= done.keys():
        return rounding.blocks
    began = time.perf_counter()
    for unit in _made(work, rounding):
        now = time.perf_counter()
        position = names.index(unit) + 1
        work.progress(Event("quantize", shown(unit), position, len(names), now - began))
        began = now
    return rounding.blocks


def _made(work: FilePass, rounding: BlockRounding) -> Iterator[str]:
    """Each unit's name once it is recorded: what it wrote has been flushed before."""
    done = tuple(work.journal.units)
    chain = _chain(work) if work.plan.needs_calibration else None
    walked = round_alone(rounding, done) if chain is None else round_along(rounding, chain, done)
    for unit, made in walked:
        if made:
            rounding.blocks.flush()
        if chain is not None:
            _flush_behind(chain, unit)
        record_unit(work, unit, [asdict(layer) for layer in _layers(work, (unit, made))])
        yield unit


def _chain(work: FilePass) -> Chain:
    config, weights = work.plan.recipe.calibration, work.weights
    assert config is not None, "the recipe parser asks for calibration where a stage needs it"
    skeleton = Skeleton(
        weights.checkpoint.config, weights.spec, dtype=work.dtype, device=work.device
    )
    if CALIBRATION not in work.journal.units:
        began, author = time.perf_counter(), Author(weights, lambda: skeleton, work.kept)
        draw = partial(calibration_tokens.of_run, config, author, work.folder)
        record_unit(work, CALIBRATION, draw(work.journal.journal, work.progress))
        work.progress(Event("calibrate", "all tokens drawn", 1, 1, time.perf_counter() - began))
    sha256 = work.journal.units[CALIBRATION]["sha256"]
    ids, mask = calibration_tokens.reload(work.folder, sha256)
    tokens = RoundingTokens(ids, mask, config.spill_bytes)
    return chain_of(weights, skeleton, tokens, work.folder)


def _flush_behind(chain: Chain, unit: str) -> None:
    """The states that a unit has left: those that enter the next block."""
    names = units(chain.weights.spec)
    if unit != names[-1]:
        chain.entering(names.index(unit)).flush()


def _layers(work: FilePass, unit: Unit) -> Iterator[Layer]:
    """The report's lines about what a unit rounded."""
    file = work.plan.file
    assert file is not None, "the plan is of one file"
    planned = {m.linear.tensor: m for m in file.modules}
    for made in unit[1]:
        yield _layer(planned[made.tensor], made)


def _layer(module: BlocksPlan, made: RoundedTensor) -> Layer:
    rows, columns = module.linear.shape
    return Layer(
        name=module.linear.name,
        scheme=made.kind,
        method=made.method,
        bits_per_weight=8 * module.bytes_after / (rows * columns),
        bytes_before=module.bytes_before,
        bytes_after=module.bytes_after,
        error=made.error,
        tokens=made.tokens,
        damping=made.damping,
        kept_reason=made.kept,
        block=module.block,
        role=module.linear.role,
        expert=module.linear.expert,
        passes=None if made.tokens is None else 1,
        plain_error=None if made.tokens is None else made.plain,
    )
