"""A rounded model, as a pass that trains reads and writes it: its codes stay."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from compress.arch.spec import BlockSpec
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.formats import Weights
from compress.formats.names import module_of
from compress.formats.storage import WeightStorage
from compress.passes.context import PassContext, block_tensors
from compress.quant.tensor import QuantizedTensor

Codes = Mapping[str, tuple[QuantizedTensor, bool]]


def codes_of(weights: Weights, tensors: Collection[str]) -> Codes:
    """Of those weights that are stored as codes: these, and whether the original is [K, N]."""
    found = {name: weights.quantized(name) for name in tensors}
    return {
        name: (tensor, weights.transposed(module_of(name)))
        for name, tensor in found.items()
        if tensor is not None
    }


def stored_dtype(work: PassContext) -> torch.dtype:
    """Of what a training leaves, but of scales."""
    if work.weights.format.coded:
        return work.weights.plain_dtype
    return TORCH_DTYPES[work.checkpoint.main_dtype]


def stored_tensors(weights: Weights, block: BlockSpec) -> list[str]:
    """Tensors of a block as they lie in the checkpoint: of a rounded weight all its parts."""
    named = block_tensors(block)
    if not weights.format.coded:
        return named
    coded = {module_of(name) for name in named if weights.is_quantized(module_of(name))}
    own = set(named)
    every = weights.checkpoint.tensors
    return [name for name in every if name in own or name.rpartition(".")[0] in coded]


def stored_parts(weights: Weights, learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a training has learned, by tensor of the checkpoint. learned: by tensor of the original;
    of a rounded weight its scale [N, G]."""
    return dict(_part(weights, name, value) for name, value in learned.items())


def _part(weights: Weights, name: str, value: Tensor) -> tuple[str, Tensor]:
    tensor = weights.quantized(name)
    reader = weights.format.reader
    if tensor is None or reader is None:
        return name, value
    how = WeightStorage.of_tensor(name, tensor, transposed=weights.transposed(module_of(name)))
    part = f"{module_of(name)}.{reader.scales[0]}"
    return part, weights.format.encode(how, replace(tensor, scale=value))[part]
