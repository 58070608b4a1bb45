"""Tensors of a checkpoint on their way into transformers' modules, and the checks they pass."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compress.arch.spec import BlockSpec
from compress.checkpoint.shards.dtype_codes import PLAIN_DTYPES
from compress.checkpoint.shards.finite import find_nonfinite
from compress.errors import CheckpointError

if TYPE_CHECKING:
    from compress.formats.weights import Weights

# 4,665 reads of single rows took 0.26 s on tale-6m, all of its calibration's embedding.
LONGEST_GAP, ROWS_READ = 16, 4096


def expert_paths(spec: BlockSpec) -> list[str]:
    """Module paths of fused experts: "mlp.experts" for "mlp.experts.3.gate"."""
    paths = [
        linear.module.rpartition(f".{linear.expert}.")[0]
        for linear in spec.linears
        if linear.expert is not None
    ]
    return list(dict.fromkeys(paths))


def check_names(spec: BlockSpec, wanted: Mapping[str, Tensor]) -> None:
    """CheckpointError unless disk and the module (its state_dict) have the same parameters."""
    for tensor, path in spec.modules:
        if path not in wanted:
            raise CheckpointError(
                f"tensor {tensor} has no place in transformers' module (no parameter {path} in"
                " the block); config.json may switch it off, or only a recipe without calibration"
                " and evaluation can be used on this model"
            )
    missing = sorted(set(wanted) - {path for _, path in spec.modules})
    if missing:
        raise CheckpointError(
            f"{spec.prefix}: no tensor for parameter {missing[0]} ({len(missing)} missing); the"
            " checkpoint is incomplete or config.json belongs to another model"
        )


def refuse_nonfinite(tensor: str, value: Tensor) -> None:
    """CheckpointError with number and place of NaN and infinity."""
    bad = find_nonfinite(value)
    if bad:
        raise CheckpointError(
            f"tensor {tensor!r} has {bad.describe()}; repair the checkpoint or download it again"
        )


@dataclass(slots=True, eq=False)
class RowReader:
    """Rows of the embedding. One that is stored as codes is decoded once for calls that follow each
    other, until `forget`."""

    decoded: tuple["Weights", Tensor] | None = None

    def read(self, weights: "Weights", tensor: str, ids: Tensor) -> Tensor:
        """Rows `ids` (sorted) of a matrix, without most of the rest where it is stored dense.

        CheckpointError for an id outside it, and for NaN or infinity in what was read.
        """
        if weights.stored_in(tensor) in PLAIN_DTYPES:
            check_ids(ids, tensor, weights.spec.embedding_shape[0])
            return _read_rows(weights, tensor, ids)
        if self.decoded is None or self.decoded[0] is not weights:
            self.decoded = None  # before the next one takes its place
            self.decoded = (weights, weights.read(tensor, check_finite=True))
        table = self.decoded[1]
        check_ids(ids, tensor, table.shape[0])
        return table[ids]

    def forget(self) -> None:
        self.decoded = None


def check_ids(ids: Tensor, tensor: str, rows: int) -> None:
    """CheckpointError for a token id (sorted) outside a table of that many rows."""
    if ids.numel() and not 0 <= int(ids[0]) <= int(ids[-1]) < rows:
        raise CheckpointError(
            f"token id {int(ids[-1] if ids[-1] >= rows else ids[0])} is outside {tensor}, which"
            f" has {rows} rows; the tokenizer belongs to another model"
        )


def _read_rows(weights: "Weights", tensor: str, ids: Tensor) -> Tensor:
    wanted = ids.tolist()
    parts = []
    for run in _runs(wanted):
        first, last = run[0], run[-1]
        rows_read = weights.read_rows(tensor, first, last + 1, check_finite=True)
        parts.append(rows_read[torch.tensor(run) - first])
    return torch.cat(parts)


def _runs(ids: list[int]) -> list[list[int]]:
    """Sorted ids cut where reading on would cost more than a new read, and into bounded reads."""
    runs: list[list[int]] = []
    for row in ids:
        if not runs or row - runs[-1][-1] > LONGEST_GAP or row - runs[-1][0] >= ROWS_READ:
            runs.append([])
        runs[-1].append(row)
    return runs
