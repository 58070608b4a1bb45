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
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from compress.arch.spec import LinearSpec
from compress.blocks.author import Author
from compress.blocks.capture import regroup
from compress.blocks.linear import linear_weight, set_linear_weight
from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, LoadedBlock, Passage, TokenBatch, token_batches, walk
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.evaluation.divergence import kl
from compress.evaluation.perplexity import log_softmax
from compress.events import Event, Progress
from compress.formats import Weights
from compress.methods import plain
from compress.methods.k_quants import KQuantsConfig, round_weights
from compress.methods.observed import Observed
from compress.methods.rtn import RtnConfig
from compress.passes import calibration_tokens
from compress.passes.quantize.observe import input_stats
from compress.plan.budget import BudgetUnit, Sensitivities
from compress.plan.row_counts import chunk_rows, rows_at_once
from compress.quant.ggml_kinds import Kind
from compress.quant.scheme import QuantScheme, Signs
from compress_calibration.block_inputs import HESSIAN_BYTES
from compress_calibration.config import CalibrationConfig
from compress_kernels import decode_blocks

PROBE_TOKENS = 4096  # that each unit's change is followed on
DTYPE = torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A measurement in progress.

    chain: the source and all its rows. few: the first of them, that changes are followed on.
    changed: by unit, those as they now are. effects: by unit, what its change did; errors: by layer
    and scheme.
    """

    chain: Chain
    few: Sequence[TokenBatch]
    folder: Path
    changed: dict[str, HiddenStates] = field(default_factory=dict)
    effects: dict[str, float] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)

    def final(self, states: HiddenStates) -> Iterator[Tensor]:
        """Few rows of what left the last block, behind the final norm."""
        return replace(self.chain, batches=self.few, states=(states,)).final()


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
    author = Author(weights, lambda: skeleton)
    summary = calibration_tokens.prepare(config, author, folder, progress)
    ids, mask = calibration_tokens.reload(folder, summary["sha256"])
    rows = rows_at_once((*ids.shape, spec.hidden), DTYPE, config.spill_bytes)
    probe_rows = max(1, PROBE_TOKENS // ids.shape[1])
    few_mask = None if mask is None else mask[:probe_rows]
    few = token_batches(ids[:probe_rows], few_mask, min(rows, probe_rows))
    batches = token_batches(ids, mask, rows)
    states = tuple(_states(folder / f"hidden.{i}", batches, spec.hidden) for i in (0, 1))
    probe = Probe(Chain(skeleton, weights, batches, states), few, folder)
    probe.chain.embed()
    began, count = time.perf_counter(), len(spec.blocks)
    for block in walk(probe.chain):
        index = block.spec.index
        _block(probe, block, [unit for unit in units if unit.block == index])
        now = time.perf_counter()
        progress(Event("measure", f"block {index}", index + 1, count, now - began))
        began = now
    source = probe.chain.entering(count)
    for name, changed in probe.changed.items():
        probe.effects[name] = _divergence(probe, source, changed)
    return _sensitivities(units, probe)


def _states(path: Path, batches: Sequence[TokenBatch], hidden: int) -> HiddenStates:
    return HiddenStates(path, [(*batch.ids.shape, hidden) for batch in batches], DTYPE)


def _sensitivities(units: Sequence[BudgetUnit], probe: Probe) -> Sensitivities:
    shares: dict[str, float] = {}
    for unit in units:
        coarse = unit.coarsest.describe()
        error = sum(probe.errors[x.name][coarse] for x in unit.linears)
        share = max(probe.effects[unit.name], 0.0) / error if error > 0 else 0.0
        shares |= {x.name: share for x in unit.linears}
    return Sensitivities(shares, probe.errors)


def _block(probe: Probe, block: LoadedBlock, units: Sequence[BudgetUnit]) -> None:
    """Errors of a block's layers, its outputs, those of every unit so far, and of its own units."""
    rounded: dict[str, Tensor] = {}
    for linears in _rounds(block, probe.chain.weights.spec.family, units):
        rounded |= _round(probe, block, linears, units)
    block.run_on()
    for states in probe.changed.values():
        block.on(Passage(probe.few, states, states)).run_on()
    for unit in units:
        before = [linear_weight(block.module, x).clone() for x in unit.linears]
        for x in unit.linears:
            set_linear_weight(block.module, x, rounded[x.name])
        path = probe.folder / f"unit.{len(probe.changed)}"
        changed = _states(path, probe.few, probe.chain.weights.spec.hidden)
        block.on(Passage(probe.few, block.between.source, changed)).run_on()
        for x, weight in zip(unit.linears, before, strict=True):
            set_linear_weight(block.module, x, weight)
        if unit.sensitivity == "kl":
            probe.changed[unit.name] = changed
        else:
            probe.effects[unit.name] = _difference(probe.few, block.target, changed)


def _rounds(
    block: LoadedBlock, family: str, units: Sequence[BudgetUnit]
) -> Iterator[list[LinearSpec]]:
    """The units' layers by what they read, as many together as HESSIAN_BYTES allow."""
    linears = [x for unit in units for x in unit.linears]
    if family == "generic" and linears:
        linears = list(regroup(block.module, linears, block.run_first_row))
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
    probe: Probe, block: LoadedBlock, linears: list[LinearSpec], units: Sequence[BudgetUnit]
) -> dict[str, Tensor]:
    """Note the layers' errors under every candidate; by name what they are under the coarsest."""
    unit_of = {x.name: unit for unit in units for x in unit.linears}
    tensors = probe.chain.weights.checkpoint.tensors
    stats, coarse = input_stats(block, linears, magnitudes=False), {}
    for x in linears:
        seen, unit = stats[x.shared_input], unit_of[x.name]
        weight = linear_weight(block.module, x)
        observed = Observed(seen.hessian, expert_tokens=None if x.expert is None else seen.tokens)
        dtype = TORCH_DTYPES[tensors[x.tensor].dtype]
        for scheme in unit.schemes:
            if isinstance(scheme, Kind):
                error, values = _in_blocks(weight, scheme, observed)
            else:
                error, values = _in_codes(weight, scheme, unit.signs, dtype, observed)
            probe.errors.setdefault(x.name, {})[scheme.describe()] = error
            if scheme == unit.coarsest:
                coarse[x.name] = values
    return coarse


def _in_codes(
    weight: Tensor, scheme: QuantScheme, signs: Signs, dtype: torch.dtype, observed: Observed
) -> tuple[float, Tensor]:
    """Error of plain rounding to a scheme, and the rounded weight. dtype: of scales."""
    config = RtnConfig("importance", signs)
    (outcome,) = plain.quantize([weight], scheme, config, scale_dtype=dtype, observed=observed)
    return outcome.error, outcome.quantized.dequantize(DTYPE)


def _in_blocks(weight: Tensor, kind: Kind, observed: Observed) -> tuple[float, Tensor]:
    """The same of llama.cpp's blocks."""
    (rounded,) = round_weights([weight], kind.name, KQuantsConfig(compensate=False), observed)
    return rounded.error, decode_blocks(kind.name, rounded.data)


def _difference(few: Sequence[TokenBatch], before: HiddenStates, after: HiddenStates) -> float:
    """Share of the energy of `before` that `after` differs by, over tokens that are no padding."""
    lost = whole = 0.0
    for batch in few:
        real = slice(None) if batch.mask is None else batch.mask
        x, y = (states.read(batch.index, 0, len(batch.ids))[real] for states in (before, after))
        lost += float((y - x).square().sum(dtype=torch.float64))
        whole += float(x.square().sum(dtype=torch.float64))
    return lost / whole if whole > 0 else 0.0


@torch.inference_mode()
def _divergence(probe: Probe, before: HiddenStates, after: HiddenStates) -> float:
    """Mean KL divergence of the next token in nats, from what left the last block."""
    skeleton, weights = probe.chain.skeleton, probe.chain.weights
    step, total, tokens = chunk_rows(weights.spec.vocab), 0.0, 0
    for batch, *both in zip(probe.few, probe.final(before), probe.final(after), strict=True):
        real = slice(None) if batch.mask is None else batch.mask
        p, q = (hidden[real].flatten(0, -2) for hidden in both)
        for i in range(0, len(p), step):
            log_p, log_q = (log_softmax(skeleton.logits(weights, x[i : i + step])) for x in (p, q))
            total += float(kl(log_p, log_q).sum())
        tokens += len(p)
    return total / max(tokens, 1)
