"""Final hidden states of a model on all windows, one decoder block in memory at a time."""

import hashlib
from collections.abc import Sequence
from functools import partial

import torch

from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, LoadedBlock, TokenBatch, walk
from compress.evaluation.batches import Batch
from compress.evaluation.workspace import Workspace
from compress.events import Event, note
from compress.formats.weights import Weights
from compress.recipe.evaluation_config import EvaluationConfig
from compress.usercache.entry import Entry
from compress.usercache.facts import computed_facts

KEPT = "the source's evaluation"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # by their names in a recipe


def make_skeleton(weights: Weights, dtype: torch.dtype, work: Workspace) -> Skeleton:
    """The model without weights, its blocks ready to be filled one by one."""
    return Skeleton(weights.checkpoint.config, weights.spec, dtype=dtype, device=work.device)


def final_states(
    weights: Weights,
    batches: Sequence[Batch],
    config: EvaluationConfig,
    work: Workspace,
    label: str,
) -> HiddenStates:
    """Hidden states behind the final norm that predict the scored tokens.

    Returns a store with one tensor [tokens, hidden], in the order of the batches' targets; the
    caller closes it. `label` ("source", "result") names its file and the progress.
    Raises CheckpointError, naming the tensor, for weights with NaN or Inf.
    """
    hidden, dtype, budget = weights.spec.hidden, DTYPES[config.dtype], config.spill_bytes
    skeleton = make_skeleton(weights, dtype, work)
    tokens = sum(len(batch.targets) for batch in batches)
    final = _store(weights, tokens, config, work, label)
    shapes = [(*batch.ids.shape, hidden) for batch in batches]
    path = work.folder / f"{label}-hidden.bin"
    try:
        with HiddenStates(path, shapes, dtype, budget=budget) as states:
            rows = tuple(TokenBatch(i, batch.ids) for i, batch in enumerate(batches))
            chain = Chain(skeleton, weights, rows, (states,))
            _through_blocks(chain, work, label)
            _collect(chain, batches, final)
    except BaseException:
        final.close()
        raise
    return final


def source_states(
    weights: Weights, batches: Sequence[Batch], config: EvaluationConfig, work: Workspace
) -> HiddenStates:
    """As `final_states`, of a source: they are kept, so that results of one source that are
    measured on the same tokens take them from there."""
    facts = computed_facts(weights.checkpoint, work.device, DTYPES[config.dtype])
    if work.kept is None or facts is None:
        return final_states(weights, batches, config, work, "source")
    tokens = sum(len(batch.targets) for batch in batches)
    row = weights.spec.hidden * DTYPES[config.dtype].itemsize
    entry = Entry("states", {**facts, "tokens": _digest(batches)}, tokens * row, row)
    found = _store(weights, tokens, config, work, "source")
    filled = 0

    def take(piece: memoryview) -> None:
        nonlocal filled
        rows = torch.frombuffer(piece, dtype=found.dtype).view(-1, weights.spec.hidden)
        found.write(0, rows, filled)
        filled += len(rows)

    if work.kept.find(entry, take, KEPT):
        work.progress(note("evaluate source", "its final states, as kept"))
        return found
    found.close()
    made = final_states(weights, batches, config, work, "source")
    work.kept.keep(entry, partial(made.pieces, 0))
    return made


def _digest(batches: Sequence[Batch]) -> str:
    """Of all that says what goes through the blocks together, and what is scored."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(repr(tuple(batch.ids.shape)).encode())
        for part in (batch.ids, batch.predicting):
            digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _store(
    weights: Weights, tokens: int, config: EvaluationConfig, work: Workspace, label: str
) -> HiddenStates:
    shape = (tokens, weights.spec.hidden)
    path, dtype = work.folder / f"{label}-final.bin", DTYPES[config.dtype]
    return HiddenStates(path, [shape], dtype, budget=config.spill_bytes)


def _through_blocks(chain: Chain, work: Workspace, label: str) -> None:
    """Embed every batch, then carry all of them through block after block, in place."""
    chain.embed()
    count = len(chain.weights.spec.blocks)
    for block in walk(chain):
        position = block.spec.index
        _run_on(block, chain.weights)
        work.progress(Event(f"evaluate {label}", f"block {position}", position + 1, count, 0.0))


def _run_on(block: LoadedBlock, weights: Weights) -> None:
    """As the checkpoint means it: keys and values go through the cache that it asks for."""
    cache = block.skeleton.stored_cache(weights, block.spec.index)
    block.run_on(lambda mask: cache)


@torch.inference_mode()
def _collect(chain: Chain, batches: Sequence[Batch], final: HiddenStates) -> None:
    """Of the states behind the final norm, the rows that predict a scored token."""
    start = 0
    for batch, hidden in zip(batches, chain.final(), strict=True):
        rows = hidden.flatten(0, 1)[batch.predicting.to(hidden.device)]
        final.write(0, rows, start)
        start += len(rows)
