"""The scaling step of a calibrated block: folds found and applied before anything is rounded."""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from compress.arch.spec import FoldPair
from compress.errors import CheckpointError
from compress.methods import METHODS
from compress.methods.folding import Fold, FoldChoice, Folds, keep_finite, storable
from compress.passes.context import block_tensors, copy_tensors, read_weight
from compress.passes.quantize.observe import BlockPass, observation_rounds, observe
from compress.passes.ranks import decided
from compress.plan.fold_pairs import why_not_fold
from compress.plan.layers import ModulePlan
from compress_calibration.hessian import InputStats


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """A block's folds, and what was seen on the way.

    stats: of all the block's inputs with the folds in them, where one pass saw them all, so that
        rounding shares it; None where it has to look by itself.
    notes: what each layer's columns went through, by layer name.
    """

    folds: Folds
    stats: dict[str, InputStats] | None = None
    notes: dict[str, list[str]] = field(default_factory=dict)

    def notes_of(self, m: ModulePlan) -> tuple[str, ...]:
        return tuple(self.notes.get(m.linear.name, ()))


@dataclass(slots=True, eq=False)
class Gathering:
    """A pair, and what its readers were seen to read in the rounds so far.

    readers: those that will be quantized. taken: stages that fold it; the others, with the reason
    why not, are in `declined`. missing: shared inputs that no round has shown yet. stats: the mean
    over the tokens of all inputs shown, None before the first, and for a pair no stage takes.
    """

    pair: FoldPair
    readers: dict[str, ModulePlan]
    declined: dict[int, str | None]
    missing: set[str]
    stats: InputStats | None = None

    def see(self, stats: dict[str, InputStats]) -> None:
        """Take what a round has shown, by shared input. One that is all the pair reads is kept as
        it is; parts, such as the experts', are weighed by tokens."""
        parts = sorted(self.missing & stats.keys())
        self.missing.difference_update(parts)
        if all(self.declined.values()):
            return
        whole = self.stats is None and len(parts) == 1 and not self.missing
        for key in parts:
            self.stats = stats[key] if whole else _mean(self.stats, stats[key])


def scale_channels(block: BlockPass, modules: list[ModulePlan]) -> Scaled:
    """Search every pair of the block for every scaling stage, in the recipe's order.

    A pair is searched after the round that shows the last of what its readers read.
    """
    scaled = Scaled(Folds.of(block.spec))
    stages = sorted({stage for m in modules for stage in m.folds})
    if not stages:
        return scaled
    waiting = _gatherings(block, modules, stages)
    rounds = observation_rounds(block.work, modules)
    for members in rounds:
        stats = observe(block, members)
        for gathering in waiting:
            gathering.see(stats)
        ready = [g for g in waiting if not g.missing]
        waiting = [g for g in waiting if g.missing]
        if len(rounds) > 1:
            stats.clear()  # before the next round's take their place
        for stage in stages:
            for gathering in ready:
                _fold(block, gathering, stage, scaled)
        del ready
    assert not waiting, [g.pair.writer for g in waiting]
    if len(rounds) > 1:
        return scaled
    inputs = {m.linear.shared_input: m.linear.tensor for m in modules}
    for key, tensor in inputs.items():
        stats[key] = scaled.folds.stats(tensor, stats.pop(key))  # one by one: they are large
    return Scaled(scaled.folds, stats, scaled.notes)


def write_others(block: BlockPass, folds: Folds) -> None:
    """Write the block's tensors that nobody quantizes, and have the block compute with the folds.

    Norms, biases and routers change with the weights that read them. Raises CheckpointError for
    one that its dtype cannot hold then.
    """
    work, planned = block.work, block.work.planned(block.spec.index)
    others = [name for name in block_tensors(block.spec) if name not in planned]
    if work.ranks.rank == 0:
        copy_tensors(work, [name for name in others if not folds.touches(name)])
    for name in (name for name in others if folds.touches(name)):
        stored = work.checkpoint.read(name, check_finite=True)
        changed = folds.vector(name, stored) if stored.dim() == 1 else folds.weight(name, stored)
        written = changed.to(stored.dtype)
        if not bool(torch.isfinite(written).all()):
            raise CheckpointError(
                f"{name} is beyond the range of {stored.dtype} after the scaling of its channels;"
                " leave its readers out of the scaling stage, or store the checkpoint as bf16"
            )
        if work.ranks.rank == 0:
            work.writer.write(name, written)
        _set(block, name, written)
    for name in (name for name in planned if folds.touches(name)):
        weight = folds.weight(name, read_weight(work, planned[name]))
        _set(block, name, weight.t() if planned[name].linear.transposed else weight)


def _set(block: BlockPass, tensor: str, value: Tensor) -> None:
    path = dict(block.spec.modules)[tensor]
    with torch.no_grad():
        block.module.get_parameter(path).copy_(value)


def _gatherings(block: BlockPass, modules: list[ModulePlan], stages: list[int]) -> list[Gathering]:
    """All pairs of the block that have a reader to quantize, with nothing seen."""
    by_name = {m.linear.name: m for m in modules}
    asked = {stage: block.work.plan.recipe.stages[stage] for stage in stages}
    found = []
    for pair in block.spec.folds:
        readers = {name: by_name[name] for name in pair.readers if name in by_name}
        declined = {i: why_not_fold(pair, block.spec, by_name, stage) for i, stage in asked.items()}
        if readers:
            # A router may be rounded by a stage that asks for no magnitudes: its input is the
            # experts' and not waited for.
            keys = {m.linear.shared_input for m in readers.values() if m.folds}
            found.append(Gathering(pair, readers, declined, keys))
    return found


def _fold(block: BlockPass, gathering: Gathering, stage: int, scaled: Scaled) -> None:
    """One stage over one pair of which everything was seen."""
    pair, reason = gathering.pair, gathering.declined[stage]
    search = partial(_search, block, gathering, stage, scaled.folds)
    choice = FoldChoice(None, reason) if reason else decided(block.work.ranks, search)
    _apply(block, pair, choice, scaled)
    label = block.work.plan.recipe.stages[stage].label
    for name, m in gathering.readers.items():
        if stage in m.folds:
            note = f"{label}, {pair.writer}: {choice.note}"
            scaled.notes.setdefault(name, []).append(note)


def _search(block: BlockPass, gathering: Gathering, stage: int, folds: Folds) -> FoldChoice:
    work, readers = block.work, gathering.readers
    stages = work.plan.recipe.stages
    method = METHODS[stages[stage].method]
    assert method.fold is not None, "matching.assign lists scaling stages only"
    assert gathering.stats is not None, gathering.pair.writer
    view = folds.view(
        gathering.pair,
        {name: read_weight(work, m).to(work.device) for name, m in readers.items()},
        {name: m.scheme for name, m in readers.items()},
        gathering.stats,
        {name: stages[m.stage].signs for name, m in readers.items()},
    )
    return method.fold(view, stages[stage].config)


def _apply(block: BlockPass, pair: FoldPair, choice: FoldChoice, scaled: Scaled) -> None:
    if choice.scale is None:
        return
    fold = Fold(pair, choice.scale)
    checkpoint = block.work.checkpoint
    if pair.kind == "norm":
        stored = checkpoint.read(pair.tensors[0], check_finite=True)
        fold = storable(fold, scaled.folds.vector(pair.tensors[0], stored))
    for name in pair.tensors[1:]:
        stored = checkpoint.read(name, check_finite=True)
        bias = scaled.folds.vector(name, stored.float())
        fold = keep_finite(fold, bias[pair.channels()], stored.dtype)
    scaled.folds.add(fold)


def _mean(so_far: InputStats | None, part: InputStats) -> InputStats:
    """Statistics of an input and one more part of it: weighed by tokens. `so_far` is used up."""
    assert part.absmax is not None, "observe keeps magnitudes for scaling stages"
    assert part.absmean is not None, "observe keeps magnitudes for scaling stages"
    if so_far is None:
        zeros = torch.zeros_like(part.absmax)
        so_far = InputStats(torch.zeros_like(part.hessian), 0, zeros, zeros.clone())
    assert so_far.absmax is not None
    assert so_far.absmean is not None
    tokens = so_far.tokens + part.tokens
    share = part.tokens / max(1, tokens)
    return InputStats(
        so_far.hessian.lerp_(part.hessian, share),
        tokens,
        torch.maximum(so_far.absmax, part.absmax),
        so_far.absmean.lerp_(part.absmean, share),
    )
