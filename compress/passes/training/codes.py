"""A rounded model, as a pass that trains reads and writes it."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from compress.arch.spec import BlockSpec
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.distill.coded import Moving
from compress.distill.loop import Training
from compress.distill.rounding import TRAVEL
from compress.formats import Weights
from compress.formats.names import module_of
from compress.formats.storage import WeightStorage
from compress.passes.context import PassContext, block_tensors
from compress.passes.training.setting import TrainingPass
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


def moving_of(each: TrainingPass, training: Training) -> Moving | None:
    """How codes move in a training; None for one that leaves them."""
    if each.dense is None:
        return None
    assert training.rate is not None, "what trains a rounded model has a rate of its own"
    return Moving(each.dense.read, TRAVEL / (training.steps * training.rate))


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
    modules = {name: module_of(name) for name in named if name.endswith(".weight")}
    coded = {module for module in modules.values() if weights.is_quantized(module)}
    gone = {name for name, module in modules.items() if module in coded}
    every, kept = weights.checkpoint.tensors, set(named) - gone
    return [name for name in every if name in kept or name.rpartition(".")[0] in coded]


def stored_parts(
    weights: Weights, learned: Mapping[str, Tensor | QuantizedTensor]
) -> dict[str, Tensor]:
    """What a training has learned, by tensor of the checkpoint. learned: by tensor of the original;
    of a rounded weight its scale [N, G], or all of it where codes moved."""
    parts: dict[str, Tensor] = {}
    for name, value in learned.items():
        parts |= _parts(weights, name, value)
    return parts


def _parts(weights: Weights, name: str, value: Tensor | QuantizedTensor) -> dict[str, Tensor]:
    reader, encode = weights.format.reader, weights.format.encode
    if isinstance(value, QuantizedTensor):
        assert reader is not None, f"{name} has codes"
        made = encode(_storage(weights, name, value), value)
        written = {f"{module_of(name)}.{part}" for part in reader.large}
        return {part: tensor for part, tensor in made.items() if part in written}
    tensor = weights.quantized(name)
    if tensor is None or reader is None:
        return {name: value}
    part = f"{module_of(name)}.{reader.scales[0]}"
    return {part: encode(_storage(weights, name, tensor), replace(tensor, scale=value))[part]}


def _storage(weights: Weights, name: str, tensor: QuantizedTensor) -> WeightStorage:
    transposed = weights.transposed(module_of(name))
    return WeightStorage.of_tensor(name, tensor, transposed=transposed)
