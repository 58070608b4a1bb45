"""What storing layers in each of several schemes would lose, measured once on the source model.

Two numbers make a layer's loss under a scheme. Its error is the share of its output's energy that
plain rounding loses, tr(D H D') / tr(W H W'): it tells the schemes of a layer apart, and needs no
forward. It says nothing of what the rest of the model makes of it, so one layer's cannot be held
against another's. For that every unit (layers that are stored alike) is rounded by itself to its
candidate of fewest bits, and what then changes behind it is measured: the mean KL divergence of
the next token ("kl", in nats), or the share of the energy of its block's output ("output_error").
Both grow with the square of a small change, as the error does, so their quotient is the unit's
weight, and weight times error the loss under any scheme. That is one forward a unit and not one a
candidate, and 8 bits are told although their own effect would drown in the noise of arithmetic.

All arithmetic is fp32. The source goes through block by block, beside it the few rows that each
unit so far has changed.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.arch.spec import LinearSpec
from compress.blocks.capture import regroup
from compress.blocks.linear import linear_weight, set_linear_weight
from compress.blocks.skeleton import BlockContext, Skeleton
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.evaluation.divergence import kl
from compress.evaluation.perplexity import log_softmax
from compress.events import Event, Progress
from compress.formats import Weights
from compress.methods import plain
from compress.methods.observed import Observed
from compress.methods.rtn import RtnConfig
from compress.passes import calibration_tokens
from compress.passes.hidden_states import HiddenStates
from compress.passes.quantize.observe import HESSIAN_BYTES, Batches, Observer, OnBatch
from compress.plan.budget import BudgetUnit, Sensitivities
from compress.plan.row_counts import chunk_rows, rows_at_once
from compress.quant.tensor import QuantizedTensor
from compress_calibration.config import CalibrationConfig

PROBE_TOKENS = 4096  # that each unit's change is followed on
DTYPE = torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A measurement in progress.

    few: the rows that changes are followed on, the first of `batches`. changed: by unit, its rows
    as they now are. effects: by unit, what its change did; errors: by layer and scheme.
    """

    weights: Weights
    batches: Batches
    few: Batches
    folder: Path
    changed: dict[str, HiddenStates] = field(default_factory=dict)
    effects: dict[str, float] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def skeleton(self) -> Skeleton:
        return self.batches.skeleton

    def states(self, name: str, batches: Batches) -> HiddenStates:
        shape = (*batches.ids.shape, self.weights.spec.hidden)
        return HiddenStates(self.folder / name, shape, DTYPE)


def measure(
    units: Sequence[BudgetUnit],
    config: CalibrationConfig,
    weights: Weights,
    device: str,
    folder: Path,
    progress: Progress,
) -> Sensitivities:
    """The sensitivities of all units. config: with lengths that fit the model. folder: an empty one
    for what passes through; the caller removes it."""
    spec = weights.spec
    skeleton = Skeleton(weights.checkpoint.config, spec, dtype=DTYPE, device=device)
    summary = calibration_tokens.prepare(config, weights, skeleton, folder, progress)
    ids, mask = calibration_tokens.reload(folder, summary["sha256"])
    rows = rows_at_once((*ids.shape, spec.hidden), DTYPE, config.spill_bytes)
    probe_rows = max(1, PROBE_TOKENS // ids.shape[1])
    few_mask = None if mask is None else mask[:probe_rows]
    few = Batches(ids[:probe_rows], few_mask, skeleton, min(rows, probe_rows))
    probe = Probe(weights, Batches(ids, mask, skeleton, rows), few, folder)
    source, target = (probe.states(f"hidden.{i}", probe.batches) for i in (0, 1))
    for start, stop in probe.batches:
        rows_mask = None if mask is None else mask[start:stop]
        source.write(start, skeleton.embed(weights, ids[start:stop], rows_mask))
    for block in spec.blocks:
        began = time.perf_counter()
        here = [unit for unit in units if unit.block == block.index]
        _block(probe, block.index, here, source, target)
        source, target = target, source
        spent = time.perf_counter() - began
        progress(Event("measure", f"block {block.index}", block.index + 1, len(spec.blocks), spent))
    for name, states in probe.changed.items():
        probe.effects[name] = _divergence(probe, source, states)
    return _sensitivities(units, probe)


def _sensitivities(units: Sequence[BudgetUnit], probe: Probe) -> Sensitivities:
    shares: dict[str, float] = {}
    for unit in units:
        coarse = unit.coarsest.describe()
        error = sum(probe.errors[x.name][coarse] for x in unit.linears)
        share = max(probe.effects[unit.name], 0.0) / error if error > 0 else 0.0
        shares |= {x.name: share for x in unit.linears}
    return Sensitivities(shares, probe.errors)


def _block(
    probe: Probe,
    index: int,
    units: Sequence[BudgetUnit],
    source: HiddenStates,
    target: HiddenStates,
) -> None:
    """Errors of a block's layers, its outputs, those of every unit so far, and of its own units."""
    skeleton = probe.skeleton
    module = skeleton.load_block(probe.weights, index)
    rounded: dict[str, QuantizedTensor] = {}
    for linears in _rounds(probe, module, index, units, source):
        rounded |= _round(probe, module, index, linears, units, source)
    probe.batches.forward(source, _through(skeleton, module, index, target))
    for states in probe.changed.values():
        probe.few.forward(states, _through(skeleton, module, index, states))
    for unit in units:
        before = [linear_weight(module, x).clone() for x in unit.linears]
        for x in unit.linears:
            set_linear_weight(module, x, rounded[x.name].dequantize(DTYPE))
        changed = probe.states(f"unit.{len(probe.changed)}", probe.few)
        probe.few.forward(source, _through(skeleton, module, index, changed))
        for x, weight in zip(unit.linears, before, strict=True):
            set_linear_weight(module, x, weight)
        if unit.sensitivity == "kl":
            probe.changed[unit.name] = changed
        else:
            probe.effects[unit.name] = _difference(probe.few, target, changed)


def _through(skeleton: Skeleton, module: nn.Module, index: int, target: HiddenStates) -> OnBatch:
    """A batch through a block into `target`, which may be where it comes from."""

    def on_batch(hidden: Tensor, mask: Tensor | None, context: BlockContext, start: int) -> None:
        target.write(start, skeleton.run_block(module, index, hidden, context))

    return on_batch


def _rounds(
    probe: Probe, module: nn.Module, index: int, units: Sequence[BudgetUnit], source: HiddenStates
) -> Iterator[list[LinearSpec]]:
    """The units' layers by what they read, as many together as HESSIAN_BYTES allow."""
    linears = [x for unit in units for x in unit.linears]
    if probe.weights.spec.family == "generic" and linears:
        skeleton, ids = probe.skeleton, probe.batches.ids[:1]
        hidden = source.read(0, 1).to(skeleton.device)
        context = skeleton.context(ids, None)
        run = partial(skeleton.run_block, module, index, hidden, context)
        linears = list(regroup(module, linears, run))
    together: list[LinearSpec] = []
    held = 0
    for key in dict.fromkeys(x.shared_input for x in linears):
        same = [x for x in linears if x.shared_input == key]
        size = 4 * same[0].shape[1] ** 2
        if together and held + size > HESSIAN_BYTES:
            yield together
            together, held = [], 0
        together, held = [*together, *same], held + size
    if together:
        yield together


def _round(
    probe: Probe,
    module: nn.Module,
    index: int,
    linears: list[LinearSpec],
    units: Sequence[BudgetUnit],
    source: HiddenStates,
) -> dict[str, QuantizedTensor]:
    """Note the layers' errors under every candidate; their codes under the coarsest, by name."""
    unit_of = {x.name: unit for unit in units for x in unit.linears}
    observer = Observer.create(probe.skeleton, module, index, linears, magnitudes=False)
    probe.batches.forward(source, observer.on_batch)
    stats, coarse = observer.stats(), {}
    for x in linears:
        seen, unit = stats[x.shared_input], unit_of[x.name]
        weight = linear_weight(module, x)
        observed = Observed(seen.hessian, expert_tokens=None if x.expert is None else seen.tokens)
        for scheme in unit.schemes:
            (outcome,) = plain.quantize(
                [weight],
                scheme,
                RtnConfig("importance", unit.signs),
                scale_dtype=TORCH_DTYPES[probe.weights.checkpoint.tensors[x.tensor].dtype],
                observed=observed,
            )
            probe.errors.setdefault(x.name, {})[scheme.describe()] = outcome.error
            if scheme == unit.coarsest:
                coarse[x.name] = outcome.quantized
    return coarse


def _difference(few: Batches, before: HiddenStates, after: HiddenStates) -> float:
    """Share of the energy of `before` that `after` differs by, over tokens that are no padding."""
    lost = whole = 0.0
    for start, stop in few:
        real = slice(None) if few.mask is None else few.mask[start:stop]
        x, y = before.read(start, stop)[real], after.read(start, stop)[real]
        lost += float((y - x).square().sum(dtype=torch.float64))
        whole += float(x.square().sum(dtype=torch.float64))
    return lost / whole if whole > 0 else 0.0


@torch.inference_mode()
def _divergence(probe: Probe, before: HiddenStates, after: HiddenStates) -> float:
    """Mean KL divergence of the next token in nats, from final hidden states of the last block."""
    few, skeleton, weights = probe.few, probe.skeleton, probe.weights
    step, total, tokens = chunk_rows(weights.spec.vocab), 0.0, 0
    for start, stop in few:
        real = slice(None) if few.mask is None else few.mask[start:stop]
        both = [
            skeleton.final_hidden(weights, states.read(start, stop).to(skeleton.device))[real]
            for states in (before, after)
        ]
        p, q = (hidden.flatten(0, -2) for hidden in both)
        for i in range(0, len(p), step):
            log_p, log_q = (log_softmax(skeleton.logits(weights, x[i : i + step])) for x in (p, q))
            total += float(kl(log_p, log_q).sum())
        tokens += len(p)
    return total / max(tokens, 1)
