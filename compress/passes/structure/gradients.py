"""What the loss would change by without each channel: from gradients of the whole model.

One pass over the calibration rows, before the first block is changed. What is kept are sums by
channel, which are small; while they are taken, the model and its gradients are in memory.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compress.arch.spec import BlockSpec, LinearSpec
from compress.blocks.linear import is_conv1d
from compress.distill.losses import NO_LABEL
from compress.distill.memory import gradient_rows
from compress.distill.rows import TokenRows, all_rows
from compress.distill.student import WholeModel, open_whole
from compress.edits.learned import WRITERS, producers_of
from compress.edits.select.taylor import change_of_loss
from compress.errors import CheckpointError
from compress.events import by_tenths
from compress.passes.structure.files import keep, read_kept
from compress.passes.structure.tokens import ReadsModel, skeleton_of

FILE = "gradients.safetensors"
Changes = Mapping[str, tuple[Tensor, ...]]


def find_changes(work: ReadsModel, tokens: tuple[Tensor, Tensor | None], folder: Path) -> str:
    """Take the gradients of the next tokens' mean loss on all rows, and keep what they say.

    tokens: ids [rows, length] and mask. Returns the sha256 of the file in `folder`. CheckpointError
    where a gradient is not finite.
    """
    whole = open_whole(work.weights, skeleton_of(work, work.weights))
    blocks = work.weights.spec.blocks
    modules = [whole.model.get_submodule(path) for path in whole.blocks]
    for block, module in zip(blocks, modules, strict=True):
        for linear in _watched(block):
            module.get_submodule(linear.module).weight.requires_grad_(True)
    _backward(work, whole, all_rows(*tokens))
    found: dict[str, Tensor] = {}
    for block, module in zip(blocks, modules, strict=True):
        for linear in (x for x in block.linears if x.role in WRITERS):
            for index, part in enumerate(_changes(block, module, linear)):
                if not part.isfinite().all():
                    raise CheckpointError(
                        f"gradients at {linear.name} are not finite; take another select"
                    )
                found[f"{linear.name}:{index}"] = part
    return keep(folder / FILE, save(found))


def read_changes(folder: Path, sha256: str) -> Changes:
    """By name of each linear that writes to the residual stream: fp64 [K] of its own weight, and of
    each of its producers. OutputError where the file is not what was recorded."""
    found: dict[str, tuple[Tensor, ...]] = {}
    stored = load(read_kept(folder / FILE, sha256))
    for key in sorted(stored):  # a linear has three producers at most
        name = key.rpartition(":")[0]
        found[name] = (*found.get(name, ()), stored[key])
    return found


def _watched(block: BlockSpec) -> Iterator[LinearSpec]:
    """What writes to the residual stream, and what makes the channels that it reads."""
    for linear in block.linears:
        if linear.role in WRITERS:
            yield linear
            yield from producers_of(block, linear)


def _backward(work: ReadsModel, whole: WholeModel, rows: TokenRows) -> None:
    """Add up the gradients over all rows, some of them at a time."""
    counted = int((rows.labels() != NO_LABEL).sum())
    size = gradient_rows(rows.ids.shape[1], whole.head.vocab)
    counter = by_tenths(work.progress, "gradients", "rows")
    for index, part in enumerate(rows.parts(size, whole.device)):
        logits = whole.head.run(whole.hidden(part.ids, part.mask).flatten(0, 1))  # [tokens, vocab]
        labels = part.labels()
        loss = cross_entropy(logits.float(), labels, ignore_index=NO_LABEL, reduction="sum")
        torch.autograd.backward(loss / counted)
        counter(min((index + 1) * size, len(rows.ids)), len(rows.ids))


def _changes(block: BlockSpec, module: nn.Module, linear: LinearSpec) -> Iterator[Tensor]:
    """Of the linear's own weight, then of each of its producers: fp64 [K]."""
    weight, gradient = _pair(module, linear)
    yield change_of_loss(weight.T, gradient.T).cpu()
    channels = linear.shape[1]
    for producer in producers_of(block, linear):
        parts = (torch.split(each, channels) for each in _pair(module, producer))
        for rows, of_rows in zip(*parts, strict=True):
            yield change_of_loss(rows, of_rows).cpu()


def _pair(module: nn.Module, linear: LinearSpec) -> tuple[Tensor, Tensor]:
    """Weight and gradient [N, K] of a linear of a block; zeros where no token came by."""
    found = module.get_submodule(linear.module)
    weight = found.weight
    assert isinstance(weight, Tensor), linear.module
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    weight = weight.detach()
    return (weight.t(), gradient.t()) if is_conv1d(found) else (weight, gradient)
