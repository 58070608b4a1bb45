"""Final hidden states of a model on all windows, one decoder block in memory at a time."""

from collections.abc import Sequence

import torch

from compress.blocks.skeleton import Skeleton
from compress.evaluation.batches import Batch
from compress.evaluation.store import TensorStore
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
) -> TensorStore:
    """Hidden states behind the final norm that predict the scored tokens.

    Returns a store with one tensor [tokens, hidden], in the order of the batches' targets; the
    caller closes it. `label` ("source", "result") names its file and the progress.
    Raises CheckpointError, naming the tensor, for weights with NaN or Inf.
    """
    hidden, dtype = weights.spec.hidden, DTYPES[config.dtype]
    skeleton = make_skeleton(weights, dtype, work)
    tokens = sum(len(batch.targets) for batch in batches)
    final = TensorStore(
        work.folder / f"{label}-final.bin", [(tokens, hidden)], dtype, config.spill_bytes
    )
    shapes = [(*batch.ids.shape, hidden) for batch in batches]
    path = work.folder / f"{label}-hidden.bin"
    try:
        with TensorStore(path, shapes, dtype, config.spill_bytes) as states:
            _through_blocks(skeleton, weights, batches, states, work, label)
            _collect(skeleton, weights, batches, states, final)
    except BaseException:
        final.close()
        raise
    return final


@torch.inference_mode()
def _through_blocks(
    skeleton: Skeleton,
    weights: Weights,
    batches: Sequence[Batch],
    states: TensorStore,
    work: Workspace,
    label: str,
) -> None:
    """Embed every batch, then carry all of them through block after block, in place."""
    for index, batch in enumerate(batches):
        states.write(index, skeleton.embed(weights, batch.ids))
    count = len(weights.spec.blocks)
    for position in range(count):
        block = skeleton.load_block(weights, position)
        cache = skeleton.stored_cache(weights, position)
        for index, batch in enumerate(batches):
            # hidden: [windows, length, hidden]
            hidden = states.read(index).to(work.device)
            context = skeleton.context(batch.ids, None)
            states.write(index, skeleton.run_block(block, position, hidden, context, cache))
        # Freed before the next one is read: two blocks at a time would double the peak.
        del block
        work.progress(Event(f"evaluate {label}", f"block {position}", position + 1, count, 0.0))


@torch.inference_mode()
def _collect(
    skeleton: Skeleton,
    weights: Weights,
    batches: Sequence[Batch],
    states: TensorStore,
    final: TensorStore,
) -> None:
    """Final norm, then the rows that predict a scored token."""
    start = 0
    for index, batch in enumerate(batches):
        hidden = skeleton.final_hidden(weights, states.read(index).to(skeleton.device))
        rows = hidden.flatten(0, 1)[batch.predicting.to(hidden.device)]
        final.write(0, rows, start)
        start += len(rows)
