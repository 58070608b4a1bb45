"""Whether the tensors of a quantized checkpoint are those that its config speaks of, by headers.

Found before any weight is read: parts that are missing, of another dtype or of another shape than
the scheme needs, and parts that the scheme has no use for. What lies beside a weight may change it
(factors of its inputs, rotations), so nothing is passed over because it is unknown.
"""

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.errors import CheckpointError
from compress.formats.format import Reader, Schemes
from compress.formats.kv_cache import is_cache_tensor
from compress.formats.stored import Stored, missing
from compress.quant.scheme import QuantScheme

# What codes are stored in, and never weights.
_CODES = ("I8", "U8", "I32", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def is_quantized(module: str, tensors: Container[str], reader: Reader) -> bool:
    """Whether a module's weight is stored as codes."""
    return any(f"{module}.{part}" in tensors for part in reader.marks)


def no_scheme(module: str) -> str:
    return (
        f"{module} has quantized tensors but no config group of quantization_config matches it; the"
        " config and the tensors do not belong together"
    )


def without_values(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor of the right dtype and shape on the device meta; nothing is read."""
    info = checkpoint.tensors[name]
    return torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="meta")


def refuse_misfits(checkpoint: Checkpoint, reader: Reader, schemes: Schemes) -> None:
    """CheckpointError for the first module whose tensors are not those of its scheme, with how many
    more there are. Modules for which the config has no scheme are left to who reads them."""
    found = dict(_misfits(checkpoint, reader, schemes))
    if found:
        first = next(iter(found.values()))
        more = f" (and {len(found) - 1} more modules do not fit)" if len(found) > 1 else ""
        raise CheckpointError(first + more)


def _misfits(checkpoint: Checkpoint, reader: Reader, schemes: Schemes) -> Iterator[tuple[str, str]]:
    """Modules with what is wrong with each."""
    members = _members(checkpoint.tensors, reader)
    for module, parts in members.items():
        scheme = schemes.scheme(module)
        if scheme is None:
            continue
        try:
            used = _used(checkpoint, reader, module, scheme)
            if scheme.granularity == "group" and reader.reorders(schemes, module):
                _require_order(reader, module, scheme, used)
        except CheckpointError as error:
            yield module, str(error)
            continue
        if unused := [part for part in parts if part not in used]:
            yield module, _unknown(module, unused[0], scheme)
    for name, info in checkpoint.tensors.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and module not in members and info.dtype in _CODES:
            yield module, _without_scales(name, info.dtype, reader)


def _members(tensors: Mapping[str, Any], reader: Reader) -> dict[str, list[str]]:
    """Quantized modules, each with the names of what lies below it, biases and scales of the cache
    left out."""
    split = [(name.rpartition(".")[0], name) for name in tensors]
    found: dict[str, list[str]] = {m: [] for m, _ in split if is_quantized(m, tensors, reader)}
    for _, name in split:
        module = name
        while module := module.rpartition(".")[0]:
            if module in found and name != f"{module}.bias" and not is_cache_tensor(name):
                found[module].append(name.removeprefix(f"{module}."))
    return found


def _used(
    checkpoint: Checkpoint, reader: Reader, module: str, scheme: QuantScheme
) -> Container[str]:
    """The parts of a module that its weight and its inputs are made of."""

    def read(name: str) -> Tensor:
        known = name.removeprefix(f"{module}.") in reader.sizes
        return checkpoint.read(name) if known else without_values(checkpoint, name)

    return reader.gather(Stored(module, scheme, checkpoint.tensors.__contains__, read))


def _require_order(reader: Reader, module: str, scheme: QuantScheme, used: Container[str]) -> None:
    if reader.g_idx not in used:
        raise missing(module, scheme, f"{module}.{reader.g_idx}")


def _unknown(module: str, part: str, scheme: QuantScheme) -> str:
    return (
        f"tensor {module}.{part} lies beside the codes of {module}, and {scheme.describe()} has no"
        " such part; the weight without it may be another one, so take the original or a checkpoint"
        " whose tensors and quantization_config belong together"
    )


def _without_scales(name: str, dtype: str, reader: Reader) -> str:
    scales = f"{name.removesuffix('weight')}{reader.scales[0]}"
    return (
        f"tensor {name} holds {dtype} codes, and tensor {scales} is missing; the checkpoint is"
        " incomplete or its quantization_config is wrong"
    )
