"""A whole decoder in memory, run without a cache: a student with gradients, or its teacher."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compress.arch.spec import BlockSpec
from compress.blocks.landed import unland
from compress.blocks.sample import whole_model
from compress.blocks.skeleton import GivenHidden, Skeleton
from compress.distill.head import Head

if TYPE_CHECKING:
    from compress.formats.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class WholeModel:
    """transformers' own causal LM of a checkpoint, with its weights, in eval mode: no dropout.

    model: experts are separate linears; a tied head is the embedding's own parameter. names: tensor
    in the checkpoint -> parameter path in the model, for every tensor that the model computes with.
    linears: tensor of a weight in the checkpoint -> path of its module, of all linears in blocks
    but routers. blocks: paths of its blocks, in order. head: from the final norm's output to
    logits. landed: see `unland`; it computes with these tensors in another form.
    """

    model: Any
    names: Mapping[str, str]
    linears: Mapping[str, str]
    blocks: tuple[str, ...]
    head: Head
    landed: Mapping[str, int]

    @property
    def hidden_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[1])

    @property
    def device(self) -> torch.device:
        return self.head.parameters[0].device

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Behind the final norm: [batch, length, hidden].

        ids: int64 [batch, length]; mask: bool of the same shape, False for padding, or None.
        """
        base = getattr(self.model, self.model.base_model_prefix)
        seen = None if mask is None else mask.to(torch.int64)
        out: Tensor = base(input_ids=ids, attention_mask=seen, use_cache=False)[0]
        return out

    def watched(
        self, ids: Tensor, mask: Tensor | None, blocks: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """As `hidden`, and what leaves some blocks: each [batch, length, hidden]."""
        found: dict[int, Tensor] = {}

        def keep(index: int, module: Any, given: Any, out: Any) -> None:
            found[index] = out[0] if isinstance(out, tuple) else out

        modules = [(i, self.model.get_submodule(self.blocks[i])) for i in dict.fromkeys(blocks)]
        hooks = [module.register_forward_hook(partial(keep, i)) for i, module in modules]
        try:
            hidden = self.hidden(ids, mask)
        finally:
            for hook in hooks:
                hook.remove()
        return hidden, [found[i] for i in blocks]

    def checkpoint_blocks(self) -> None:
        """Keep no activations inside blocks: backward computes a block's forward again."""
        for path in self.blocks:
            block = self.model.get_submodule(path)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def open_whole(weights: "Weights", skeleton: Skeleton, *, plain: bool = True) -> WholeModel:
    """Read all weights, in the skeleton's dtype on its device; no parameter has gradients yet.

    plain: landed latents become plain ones, see `unland`; not where codes are trained, which say
    what is stored.
    """
    model: Any = whole_model(weights, skeleton)
    spec = weights.spec
    blocks = tuple(f"{skeleton.stack}.{block.index}" for block in spec.blocks)
    if spec.tied:
        # Two parameters over one storage until here; the optimizer would move it twice.
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    names = skeleton.outside_paths()
    for tensor, path in spec.outside:
        if tensor == spec.head or path == f"{skeleton.head_path}.bias":
            leaf = "weight" if tensor == spec.head else "bias"
            names[tensor] = f"{skeleton.head_path}.{leaf}"
    linears: dict[str, str] = {}
    landed: dict[str, int] = {}
    for block, prefix in zip(spec.blocks, blocks, strict=True):
        landed |= unland(model.get_submodule(prefix), block, spec.family) if plain else {}
        names |= {tensor: f"{prefix}.{path}" for tensor, path in block.modules}
        linears |= {tensor: f"{prefix}.{path}" for tensor, path in linears_of(block).items()}
    names = {name: path for name, path in names.items() if landed.get(name) != 0}
    return WholeModel(model, names, linears, blocks, _head(model), landed)


def linears_of(block: BlockSpec) -> dict[str, str]:
    """Tensor of a weight -> path below the runnable block, of all linears but routers."""
    return {x.tensor: x.module for x in block.linears if x.role != "router"}


def _head(model: Any) -> Head:
    output = model.get_output_embeddings()
    return Head(partial(_logits, model), tuple(output.parameters()), int(output.weight.shape[0]))


def _logits(model: Any, hidden: Tensor) -> Tensor:
    """hidden: [n, hidden] -> [n, vocab], by the model's own forward behind its blocks: with the
    caps and scalings that it has."""
    weight = model.get_output_embeddings().weight
    rows = hidden.to(weight.device, weight.dtype).unsqueeze(0)
    ids = torch.zeros(rows.shape[:2], dtype=torch.int64, device=hidden.device)
    with _base_giving(model, rows):
        out: Tensor = model(input_ids=ids, use_cache=False).logits
    return out.squeeze(0)


@contextmanager
def _base_giving(model: Any, hidden: Tensor) -> Iterator[None]:
    name = model.base_model_prefix
    base = getattr(model, name)
    setattr(model, name, GivenHidden(hidden))
    try:
        yield
    finally:
        setattr(model, name, base)
