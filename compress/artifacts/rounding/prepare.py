"""From calibration tokens to a model that is ready to be rounded along its blocks."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compress.artifacts.rounding.block_file import BlockFile, block_file
from compress.artifacts.rounding.walk import BlockRounding
from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, token_batches
from compress.formats.weights import Weights
from compress.methods.k_quants import KQuantsConfig
from compress.plan.row_counts import rows_at_once
from compress_exporters.gguf.plan import ToRound

BLOCKS, STATES = "blocks.rounded", ("hidden.0", "hidden.1")


@dataclass(frozen=True, slots=True, eq=False)
class RoundingTokens:
    """What is calibrated on. ids: int64 [rows, length]; mask: bool of that shape or None. at_once:
    bytes of the states of a batch. scratch: states end with the work, and are in memory up to so
    many bytes; None where a killed run goes on from them."""

    ids: Tensor
    mask: Tensor | None
    at_once: int
    scratch: int | None = None


def block_rounding(
    weights: Weights, to_round: ToRound, folder: Path, config: KQuantsConfig, device: str = "cpu"
) -> BlockRounding:
    """folder: where rows lie while the work goes on."""
    return BlockRounding(weights, to_round, blocks_of(to_round, folder), config, device)


def chain_of(weights: Weights, skeleton: Skeleton, tokens: RoundingTokens, folder: Path) -> Chain:
    """The model over the tokens. folder: where states lie while the work goes on."""
    hidden, dtype = weights.spec.hidden, skeleton.dtype
    at_once = rows_at_once((*tokens.ids.shape, hidden), dtype, tokens.at_once)
    batches = token_batches(tokens.ids, tokens.mask, at_once)
    shapes = [(*batch.ids.shape, hidden) for batch in batches]
    # Two that take turns: a run that dies inside a block finds what enters it as it was.
    states = tuple(
        HiddenStates(folder / name, shapes, dtype, budget=_half(tokens.scratch)) for name in STATES
    )
    return Chain(skeleton, weights, batches, states)


def blocks_of(to_round: ToRound, folder: Path) -> BlockFile:
    """The file of rounded rows in a working folder."""
    return block_file(folder / BLOCKS, to_round.weights)


def _half(scratch: int | None) -> int | None:
    return None if scratch is None else scratch // 2


def working_bytes(work: BlockRounding, rows: int, length: int, dtype: torch.dtype) -> int:
    """What the working folder takes: rounded rows, what columns multiply, and states before and
    behind a block."""
    states = len(STATES) * rows * length * work.spec.hidden * dtype.itemsize
    measured = 0 if work.measured is None else work.measured.rows.nbytes
    return work.blocks.nbytes + measured + states
