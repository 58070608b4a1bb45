"""What an open `mla` has to know of the model: at which frequencies its shared key rotates, and how
a budget is split between that key and the latent.

Frequencies are those of the components that gain the most by their rotation, of all layers
together, each layer by its share of what all components gain there. Every split of the budget that
later stages take (compress/plan/search/splits.py) is then tried whole, repaired, on few rows, and
the one that loses the least is taken.
"""

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, token_batches, walk
from compress.checkpoint.outline import outline_of
from compress.checkpoint.shards.dtype_codes import itemsize
from compress.edits.latent.rotated import chosen_frequencies, components_of
from compress.edits.latent.source import SourceAttention, attention_of
from compress.edits.mla import MlaConfig, shape_of
from compress.errors import DataError
from compress.events import Event
from compress.formats import Weights
from compress.passes.ranks import ONE_RANK
from compress.passes.structure.attention.latents import look_at_attention
from compress.passes.structure.chains import DEFAULT_SPILL
from compress.passes.structure.files import make_working
from compress.passes.structure.tokens import Looking, skeleton_of
from compress.passes.structure.trial import loss_of, open_bench, planned_with, trial_rows
from compress.plan.row_counts import rows_at_once
from compress.plan.search.trials import STORE
from compress.recipe.schema import EditStage
from compress.report.records.sizes import SizeCandidate

FOUND, CANDIDATES = "found", "candidates"  # keys of the record
MEASURE = "kv_bytes_per_token"


def choose_latents(
    look: Looking, stage: EditStage, source: Weights, folder: Path
) -> dict[str, Any]:
    """The record of what was found. folder: OUT.partial."""
    model = outline_of(look.weights.checkpoint, look.weights.spec)
    attention, config = attention_of(model), stage.config
    assert isinstance(config, MlaConfig), "another edit is open"
    planned = next(x for x in look.plan.edits if x.stage == stage)
    gained = summed_gains(look, source, folder) if config.rope == "any" else None
    among = planned.splits or (config,)
    known = [with_frequencies(attention, each, gained) for each in among]
    if len(known) == 1:
        return {FOUND: _said(known[0])}
    losses, began = list[float](), time.perf_counter()
    with open_bench(look, source, folder, make_working(folder)) as bench:
        for number, each in enumerate(known, 1):
            losses.append(loss_of(bench, planned_with(look, stage, each)))
            told = f"tried rank {each.rank} with rope_dim {each.rope_dim}, KL {losses[-1]:.4g}"
            spent = time.perf_counter() - began
            look.progress(Event(stage.method, told, number, len(known), spent))
            began = time.perf_counter()
    finite = [x for x in losses if math.isfinite(x)]
    if not finite:
        raise DataError("no split of the budget leaves numbers that are finite; raise kv_bytes")
    best = losses.index(min(finite))
    each_number = len(model.spec.blocks) * itemsize(model.main_dtype)
    listed = [
        SizeCandidate(
            {"rank": int(each.rank or 0), "rope_dim": int(each.rope_dim or 0)},
            MEASURE,
            shape_of(attention, each).cached * each_number,
            loss,
            place="chosen" if i == best else "",
        )
        for i, (each, loss) in enumerate(zip(known, losses, strict=True))
    ]
    return {FOUND: _said(known[best]), CANDIDATES: [asdict(x) for x in listed]}


def with_latents(config: MlaConfig, record: Mapping[str, Any]) -> MlaConfig:
    """The options with what was found."""
    found = dict(record[FOUND])
    frequencies = found.pop("frequencies")
    known = None if frequencies is None else tuple(frequencies)
    return replace(config, kv_bytes=None, **found, frequencies=known)


def _said(config: MlaConfig) -> dict[str, Any]:
    frequencies = None if config.frequencies is None else list(config.frequencies)
    return {"rank": config.rank, "rope_dim": config.rope_dim, "frequencies": frequencies}


def with_frequencies(
    attention: SourceAttention, config: MlaConfig, gained: Tensor | None
) -> MlaConfig:
    """The options with the frequencies that gain the most; as they are where these are known."""
    if gained is None:
        return config
    rotated = shape_of(attention, config).rotated
    return replace(config, frequencies=chosen_frequencies(gained, rotated // 2))


def summed_gains(look: Looking, source: Weights, folder: Path) -> Tensor:
    """What each component of each frequency gains by its rotation, in all layers: [F, G]."""
    ids, mask = trial_rows(look, source, folder).fit
    hidden = look.weights.spec.hidden
    batches = token_batches(
        ids, mask, rows_at_once((*ids.shape, hidden), torch.float32, DEFAULT_SPILL)
    )
    shapes = [(*batch.ids.shape, hidden) for batch in batches]
    total: Tensor | None = None
    with ExitStack() as stack:
        path = make_working(folder) / "chosen.model"
        states = stack.enter_context(HiddenStates(path, shapes, look.dtype, budget=STORE))
        chain = Chain(skeleton_of(look, look.weights), look.weights, batches, (states,))
        chain.embed()
        for block in walk(chain):
            gained = components_of(look_at_attention(block, look.weights, ONE_RANK)).gains
            share = gained / gained.sum().clamp(min=1e-300)
            total = share if total is None else total + share
            block.run_on()
    assert total is not None, "a model has blocks"
    return total
