"""Final hidden states of a model on all windows, one decoder block in memory at a time."""

from collections.abc import Sequence

import torch

from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, LoadedBlock, TokenBatch, walk
from compress.evaluation.batches import Batch
from compress.evaluation.workspace import Workspace
from compress.events import Event
from compress.formats.weights import Weights
from compress.recipe.evaluation_config import EvaluationConfig

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
    final = HiddenStates(
        work.folder / f"{label}-final.bin", [(tokens, hidden)], dtype, budget=budget
    )
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
