"""The scaling step of a calibrated block: folds found and applied before anything is rounded."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compress.arch.spec import FoldPair
from compress.methods import METHODS
from compress.methods.folding import Choice, Fold, Folds, settle
from compress.pipeline.modules import ModulePlan
from compress.pipeline.observing import BlockPass, observation_rounds, observe
from compress.pipeline.pairs import against
from compress.pipeline.work import block_tensors, copy_tensors, read_weight
from compress_calibration.hessian import Stats


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """A block's folds, and what was seen on the way.

    stats: of all the block's inputs with the folds in them, where one pass saw them all, so that
        rounding shares it; None where it has to look by itself.
    notes: what each layer's columns went through, by layer name.
    """

    folds: Folds
    stats: dict[str, Stats] | None = None
    notes: dict[str, list[str]] = field(default_factory=dict)

    def remarks(self, m: ModulePlan) -> tuple[str, ...]:
        return tuple(self.notes.get(m.linear.name, ()))


def scale_channels(block: BlockPass, modules: list[ModulePlan]) -> Scaled:
    """Search every pair of the block for every scaling stage, in the recipe's order."""
    scaled = Scaled(Folds.of(block.spec))
    stages = sorted({stage for m in modules for stage in m.folds})
    if not stages:
        return scaled
    rounds = observation_rounds(block.work, modules)
    for members in rounds:
        stats = observe(block, members)
        for stage in stages:
            _fold_stage(block, modules, members, stats, stage, scaled)
    if len(rounds) > 1:
        return scaled
    inputs = {m.linear.shared_input: m.linear.tensor for m in modules}
    seen = {key: scaled.folds.stats(tensor, stats[key]) for key, tensor in inputs.items()}
    return Scaled(scaled.folds, seen, scaled.notes)


def write_others(block: BlockPass, folds: Folds) -> None:
    """Write the block's tensors that nobody quantizes, and have the block compute with the folds.

    Norms, biases and routers change with the weights that read them.
    """
    work, planned = block.work, block.work.planned(block.spec.index)
    others = [name for name in block_tensors(block.spec) if name not in planned]
    copy_tensors(work, [name for name in others if not folds.touches(name)])
    for name in (name for name in others if folds.touches(name)):
        stored = work.checkpoint.read(name, check_finite=True)
        changed = folds.vector(name, stored) if stored.dim() == 1 else folds.weight(name, stored)
        work.writer.write(name, changed.to(stored.dtype))
        _set(block, name, changed)
    for name in (name for name in planned if folds.touches(name)):
        weight = folds.weight(name, read_weight(work, planned[name]))
        _set(block, name, weight.t() if planned[name].linear.transposed else weight)


def _set(block: BlockPass, tensor: str, value: Tensor) -> None:
    path = dict(block.spec.modules)[tensor]
    with torch.no_grad():
        block.module.get_parameter(path).copy_(value)


def _fold_stage(
    block: BlockPass,
    modules: list[ModulePlan],
    members: list[ModulePlan],
    stats: dict[str, Stats],
    stage: int,
    scaled: Scaled,
) -> None:
    """One stage over the pairs whose readers were observed in this round."""
    by_name = {m.linear.name: m for m in modules}
    observed = {m.linear.name for m in members}
    method = METHODS[block.work.plan.recipe.stages[stage].method]
    config = block.work.plan.recipe.stages[stage].config
    assert method.fold is not None, "matching.assign lists scaling stages only"
    for pair in block.spec.folds:
        rounded = {name: by_name[name] for name in pair.readers if name in by_name}
        if not rounded or not rounded.keys() <= observed:
            continue
        reason = against(pair, block.spec, by_name, stage)
        if reason is None:
            view = scaled.folds.view(
                pair,
                _weights(block, pair),
                {name: m.scheme for name, m in rounded.items()},
                _together([stats[key] for key in _keys(rounded)]),
            )
            choice = method.fold(view, config)
        else:
            choice = Choice(None, reason)
        _apply(block, pair, choice, scaled)
        for name, m in rounded.items():
            if stage in m.folds:
                note = f"stages[{stage}], {pair.writer}: {choice.note}"
                scaled.notes.setdefault(name, []).append(note)


def _apply(block: BlockPass, pair: FoldPair, choice: Choice, scaled: Scaled) -> None:
    if choice.scale is None:
        return
    fold = Fold(pair, choice.scale)
    if pair.kind == "norm":
        stored = block.work.checkpoint.read(pair.tensors[0], check_finite=True)
        fold = settle(fold, scaled.folds.vector(pair.tensors[0], stored))
    scaled.folds.add(fold)


def _weights(block: BlockPass, pair: FoldPair) -> dict[str, Tensor]:
    """Source weights [N, K] of all readers, on the run's device."""
    work, planned = block.work, block.work.planned(block.spec.index)
    linears = {linear.name: linear for linear in block.spec.linears}
    weights = {}
    for name in pair.readers:
        tensor = linears[name].tensor
        if tensor in planned:
            weights[name] = read_weight(work, planned[tensor]).to(work.device)
        else:
            weights[name] = work.checkpoint.read(tensor, check_finite=True).to(work.device)
    return weights


def _keys(modules: Mapping[str, ModulePlan]) -> list[str]:
    return [*dict.fromkeys(m.linear.shared_input for m in modules.values())]


def _together(parts: list[Stats]) -> Stats:
    """Statistics of one input that is seen in parts, such as by experts: weighed by tokens."""
    if len(parts) == 1:
        return parts[0]
    tokens = max(1, sum(s.tokens for s in parts))
    peaks = torch.stack([s.absmax for s in parts if s.absmax is not None])
    means = [s.absmean * (s.tokens / tokens) for s in parts if s.absmean is not None]
    return Stats(
        torch.stack([s.hessian * (s.tokens / tokens) for s in parts]).sum(0),
        sum(s.tokens for s in parts),
        peaks.amax(0),
        torch.stack(means).sum(0),
    )
