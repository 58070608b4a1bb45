"""What every pass of a run works with, and the one way tensors leave it."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.arch.spec import BlockSpec
from compress.checkpoint import Checkpoint, ShardWriter
from compress.events import Progress
from compress.formats import FORMATS, Weights
from compress.methods.outcome import Outcome
from compress.passes import outliers
from compress.passes.copying import copy, row_ranges
from compress.passes.journal import PassJournal
from compress.passes.ranks import ONE_RANK, Ranks
from compress.plan.layers import ModulePlan
from compress.plan.plan import Plan
from compress.quant.tensor import QuantizedTensor
from compress.report.schema import Layer
from compress.usercache.cache import UserCache


class Records(Protocol):
    """What has a journal of its pass."""

    @property
    def journal(self) -> PassJournal: ...
    @property
    def ranks(self) -> Ranks: ...


@dataclass(frozen=True, slots=True, eq=False)
class PassContext:
    """A run in progress. `dtype` is the compute dtype of calibrated passes; `ranks` are the
    processes that make the result together; `kept` is where text of the model's own lies."""

    plan: Plan
    checkpoint: Checkpoint
    weights: Weights
    writer: ShardWriter
    journal: PassJournal
    progress: Progress
    dtype: torch.dtype
    device: str
    ranks: Ranks = ONE_RANK
    kept: UserCache | None = None

    @property
    def head(self) -> ModulePlan | None:
        """The output head, where it waits for what the last block gives."""
        return self.plan.head

    def planned(self, block: int | None) -> dict[str, ModulePlan]:
        """Modules to quantize in a block (None: outside the blocks), by source tensor."""
        return {m.linear.tensor: m for m in self.plan.modules if m.block == block}


def outside_tensors(plan: Plan) -> list[str]:
    """Tensors of the model to round that lie in no block, in file order; without a head that waits
    for what the last block says."""
    inside = {name for block in plan.spec.blocks for name in block_tensors(block)}
    head = plan.head
    return [
        name
        for name in plan.tensors
        if name not in inside and (head is None or name != head.linear.tensor)
    ]


def block_tensors(block: BlockSpec) -> list[str]:
    """Source tensors of a block, recognised or not."""
    return [*dict.fromkeys(tensor for tensor, _ in block.modules), *block.unrecognised]


def copy_tensors(work: PassContext, names: Iterable[str]) -> None:
    """Carry tensors over as they are; NaN or Inf in one is an error that names it."""
    copy(work.checkpoint, work.writer, names)


def store(work: PassContext, module: ModulePlan, quantized: QuantizedTensor) -> int:
    """Encode a result in the plan's format and write it at its place.

    Returns the bytes that it takes beyond the plan: those of calibrated outlier columns.
    """
    dtype = work.checkpoint.tensors[module.linear.tensor].dtype
    codec = FORMATS[work.plan.format]
    for part, tensor in codec.encode(module.storage(dtype), quantized).items():
        work.writer.write(part, tensor)
    if quantized.outliers is None or codec.outliers is None or not outliers.is_calibrated(module):
        return 0
    return outliers.keep(work.writer.folder, module, quantized.outliers, codec.outliers)


def finish_unit(work: PassContext, unit: str, sources: Iterable[str], layers: list[Layer]) -> None:
    """Flush what a unit wrote, then record it: in this order, or a crash could lose it."""
    names = {t[0] for name in sources for t in work.plan.tensors[name]}
    work.writer.flush(names)
    for rank in range(work.ranks.size):
        work.writer.written |= work.ranks.broadcast(work.writer.written & names, rank)
    record_unit(work, unit, [asdict(layer) for layer in layers])


def record_unit(work: Records, unit: str, data: Any) -> None:
    """Mark a unit as done when every rank has flushed what it wrote of it. None goes on before that
    is on the disk: the next block's outputs take the place of what entered this one."""
    work.ranks.barrier()
    if work.ranks.rank == 0:
        work.journal.record(unit, data)
    else:
        work.journal.units[unit] = data
    work.ranks.barrier()


def layer_record(
    module: ModulePlan,
    outcome: Outcome,
    *,
    tokens: int | None = None,
    beyond: int = 0,
    folds: tuple[str, ...] = (),
) -> Layer:
    """The report's line about one quantized linear.

    tokens: behind what was observed of it. beyond: what `store` returned. folds: remarks on the
    scaling of its columns.
    """
    n, k = module.linear.shape
    stored = module.bytes_after + beyond
    facts: dict[str, Any] = {"block": module.block, "role": module.linear.role}
    return Layer(
        name=module.linear.name,
        scheme=module.scheme.describe(),
        method=outcome.method,
        bits_per_weight=8 * stored / (n * k),
        bytes_before=module.bytes_before,
        bytes_after=stored,
        error=outcome.error,
        tokens=tokens,
        damping=outcome.damping,
        kept_reason=outcome.kept,
        dead_columns=outcome.dead,
        outlier_columns=outcome.outlier_columns,
        plain_error=outcome.plain,
        folds=folds,
        expert=module.linear.expert,
        **facts,
    )


def read_weight(work: PassContext, module: ModulePlan) -> Tensor:
    """A planned linear's source weight [N, K], whatever the order on disk; all values finite."""
    weight = work.checkpoint.read(module.linear.tensor, check_finite=True)
    return weight.t() if module.linear.transposed else weight


def read_in_rows(work: PassContext, module: ModulePlan) -> Iterator[Tensor]:
    """The same in runs of rows [n, K], in order; no run ends amid rows that share a scale."""
    linear = module.linear
    ranges = row_ranges(linear.shape, module.scheme.rows_per_scale(linear.shape[0]))
    if linear.transposed:
        whole = read_weight(work, module)
        yield from (whole[start:stop] for start, stop in ranges)
        return
    for start, stop in ranges:
        yield work.checkpoint.read_rows(linear.tensor, start, stop, check_finite=True)
