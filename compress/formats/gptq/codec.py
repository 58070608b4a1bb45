"""GPTQ's layout of one weight, both ways (read by gptqmodel, vLLM and transformers).

`x.weight` [N, K] becomes, all of it turned:
    x.qweight  int32 [ceil(K * bits / 32), N]   codes packed along K, see compress.quant.packing
    x.qzeros   int32 [G, ceil(N * bits / 32)]   zero points packed along N
    x.scales   fp16 [G, N]
    x.g_idx    int32 [K], the group of every column; k // group_size without act-order
A symmetric weight has zero points too, all 2^(bits-1).

Version 1 ("gptq") stores every zero point less one; version 2 ("gptq_v2", the file version2.py)
stores it as it is. A zero point of 0 has no place in version 1: -1 wraps to the largest code, which
AutoGPTQ's kernels read as 0, vLLM's as 2^bits, and gptqmodel's lets it carry into the next one.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compress.checkpoint.shards.layout import Entry
from compress.errors import CheckpointError, RecipeError
from compress.formats.gptq.config import BITS, V1, quantization_config, read_schemes
from compress.formats.names import module_of
from compress.formats.storage import WeightStorage
from compress.formats.stored import (
    HALVES,
    WORDS,
    Beside,
    Has,
    Parts,
    Read,
    ShapeOf,
    Stored,
    group_order,
    matrix_shape,
)
from compress.quant.packing import pack, unpack, words_for
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

NAME = V1
# What a quantized module's tensors are called below its path.
PARTS = ("qweight", "qzeros", "scales", "g_idx")
LARGE = ("qweight", "scales")
# Groups that gptqmodel's kernels take, beside one a channel.
GROUPS = (16, 32, 64, 128, 256, 512, 1024)

__all__ = [
    "GROUPS",
    "LARGE",
    "NAME",
    "PARTS",
    "beside",
    "decode",
    "encode",
    "gather",
    "layout",
    "quantization_config",
    "read_schemes",
    "unstorable",
    "weight_shape",
    "why_not",
]


def why_not(
    scheme: QuantScheme, shape: tuple[int, int] | None = None, *, g_idx: bool = False
) -> str | None:
    """Why the format cannot hold a weight (N, K), and what can; None when it can.

    g_idx: act-order "group". A group that does not divide K is fine: the last one is short.
    """
    if scheme.type == "float" or scheme.activation is not None:
        return (
            f"it holds integer weights with unquantized inputs, not {scheme.describe()}; use"
            " compressed-tensors"
        )
    if scheme.bits not in BITS:
        return f"it holds 2, 3, 4 or 8 bits, not {scheme.bits}; use compressed-tensors"
    if scheme.granularity not in ("channel", "group"):
        return (
            f"it has one scale a channel or a group, not {scheme.describe()}; use"
            " compressed-tensors, or quantize with granularity 'channel'"
        )
    if scheme.granularity == "group" and scheme.group_size not in GROUPS:
        sizes = ", ".join(str(size) for size in GROUPS)
        return (
            f"its loaders take groups of {sizes}, not of {scheme.group_size}; use"
            " compressed-tensors"
        )
    if g_idx and scheme.granularity == "channel":
        return "act-order 'group' needs groups; use act_order 'static'"
    word = 32 // math.gcd(32, scheme.bits)
    if shape is not None and (shape[0] % word or shape[1] % word):
        return (
            f"{scheme.bits}-bit weights are packed by {word}, which does not divide"
            f" {list(shape)}; use compressed-tensors, or leave the layer out"
        )
    return None


def layout(how: WeightStorage) -> list[Entry]:
    """Exact (name, dtype code, shape) of every tensor that `encode` will return.

    Scales are fp16 and everything lies [K, N], whatever the source has. RecipeError for a scheme
    that has no place here.
    """
    module, scheme, (n, k) = module_of(how.name), how.scheme, how.shape
    _refuse(how)
    groups = scheme.groups(k)
    return [
        (f"{module}.qweight", "I32", (words_for(k, scheme.bits), n)),
        (f"{module}.qzeros", "I32", (groups, words_for(n, scheme.bits))),
        (f"{module}.scales", "F16", (groups, n)),
        (f"{module}.g_idx", "I32", (k,)),
    ]


def encode(how: WeightStorage, tensor: QuantizedTensor, *, version: int = 1) -> dict[str, Tensor]:
    """Tensors to write, keyed and ordered as `layout` says. tensor: with scales in fp16.

    RecipeError for zero points that version 1 cannot store.
    """
    name, module, scheme = how.name, module_of(how.name), how.scheme
    how.expect(tensor)
    _refuse(how)
    assert tensor.scale.dtype == torch.float16, f"{name}: scales are {tensor.scale.dtype}"
    zero = torch.zeros_like(tensor.scale, dtype=torch.int8) if tensor.zero is None else tensor.zero
    if version == 1:
        zero = _less_one(name, zero, scheme)
    return {
        f"{module}.qweight": pack(tensor.codes, scheme.bits).t().contiguous(),
        f"{module}.qzeros": pack(zero.t(), scheme.bits),
        f"{module}.scales": tensor.scale.t().contiguous(),
        f"{module}.g_idx": tensor.column_groups().to(torch.int32),
    }


def decode(
    name: str, scheme: QuantScheme, has: Has, read: Read, *, version: int = 1
) -> QuantizedTensor:
    """The weight called `name`, from the tensors `encode` or another tool wrote for it.

    has, read: the checkpoint's names and its reader. K or N that the pack word does not divide are
    read where a g_idx tells K. CheckpointError when a part is missing or not what it must be.
    """
    stored = Stored(module_of(name), scheme, has, read)
    parts = gather(stored)
    _, k = _shape(stored, parts)
    codes = unpack(parts["qweight"].t().contiguous(), scheme.bits, k)
    rest = beside(stored, parts, version=version)
    return rest.around(codes, parts["scales"].t().contiguous(), scheme)


def gather(stored: Stored) -> Parts:
    """All tensors of a module, each of the dtype and shape that its scheme needs.

    CheckpointError for what does not fit; values are not looked at.
    """
    scheme, parts = stored.scheme, {"qweight": stored.get("qweight", WORDS)}
    if stored.holds("g_idx"):
        parts["g_idx"] = stored.get("g_idx", WORDS, (stored.read(stored.at("g_idx")).numel(),))
    n, k = _shape(stored, parts)
    groups = scheme.groups(k)
    parts["scales"] = stored.get("scales", HALVES, (groups, n))
    parts["qzeros"] = stored.get("qzeros", WORDS, (groups, words_for(n, scheme.bits)))
    return parts


def beside(stored: Stored, parts: Parts, *, version: int = 1) -> Beside:
    """What the weight has beside codes and scales. CheckpointError for values that cannot be."""
    n, _ = _shape(stored, parts)
    zero = unpack(parts["qzeros"], stored.scheme.bits, n).t().contiguous()
    order = parts.get("g_idx")
    return Beside(
        zero=_zero_points(stored, zero, version),
        g_idx=None if order is None else group_order(stored.at("g_idx"), order, stored.scheme),
    )


def remarks(schemes: Sequence[QuantScheme]) -> list[str]:
    """That zero points of 0, which only a run finds, end it."""
    if all(scheme.symmetric for scheme in schemes):
        return []
    found = "a group without a negative weight has a zero point of 0, which GPTQ version 1"
    return [f"{found} cannot store: the run ends where it meets one; use gptq_v2 to be safe"]


def unstorable(zero: Tensor, scheme: QuantScheme) -> int:
    """How many zero points version 1 has no place for: those of 0, of which it stores -1."""
    return int((zero == scheme.code_min).sum())


def weight_shape(module: str, scheme: QuantScheme, shape_of: ShapeOf) -> tuple[int, int]:
    """(N, K) of a quantized weight, from the shapes of its parts; CheckpointError when they
    contradict each other."""
    rows, n = matrix_shape(module, scheme, "qweight", shape_of)
    order = shape_of(f"{module}.g_idx")
    k = rows * 32 // scheme.bits if order is None else math.prod(order)
    if words_for(k, scheme.bits) != rows or k == 0:
        raise CheckpointError(
            f"tensor {module}.qweight has {rows} rows, which {scheme.bits}-bit codes of {k} columns"
            f" do not fill; bits in quantization_config or the length of {module}.g_idx is wrong"
        )
    return n, k


def _shape(stored: Stored, parts: Parts) -> tuple[int, int]:
    shapes = {stored.at(part): tuple(values.shape) for part, values in parts.items()}
    return weight_shape(stored.module, stored.scheme, shapes.get)


def _less_one(name: str, zero: Tensor, scheme: QuantScheme) -> Tensor:
    if lowest := unstorable(zero, scheme):
        raise RecipeError(
            f"{name}: {lowest} of {zero.numel()} zero points are 0, which GPTQ version 1 stores as"
            " -1 and loaders read differently; use format 'gptq_v2'"
        )
    return zero - 1


def _zero_points(stored: Stored, zero: Tensor, version: int) -> Tensor | None:
    """zero: int8 [N, G] as stored, signed. None for a symmetric scheme."""
    scheme, where = stored.scheme, f"tensor {stored.module}.qzeros"
    if version == 1:
        wrapped = int((zero == scheme.code_max).sum())
        if wrapped:
            raise CheckpointError(
                f"{where}: {wrapped} of {zero.numel()} zero points are stored as"
                f" {2**scheme.bits - 1}, a -1 of GPTQ version 1 that loaders read differently; if"
                " they are of version 2, checkpoint_format must be 'gptq_v2', else quantize again"
            )
        zero = zero + 1
    if not scheme.symmetric:
        return zero
    if bool((zero != 0).any()):
        raise CheckpointError(
            f"{where} holds zero points other than {2 ** (scheme.bits - 1)} though sym is true;"
            " checkpoint_format ('gptq' or 'gptq_v2') or sym in quantization_config is wrong"
        )
    return None


def _refuse(how: WeightStorage) -> None:
    if (found := why_not(how.scheme, how.shape, g_idx=how.act_order)) is not None:
        raise RecipeError(f"{how.name}: format {NAME!r}: {found}")
