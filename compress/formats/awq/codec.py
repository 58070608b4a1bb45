"""AWQ's GEMM layout of one weight, both ways (read by vLLM, gptqmodel and transformers).

`x.weight` [N, K], 4 bits, becomes, all of it turned:
    x.qweight  int32 [K, N / 8]   eight codes of neighbouring rows of the weight to a word
    x.qzeros   int32 [G, N / 8]   zero points, packed alike and stored as they are
    x.scales   fp16 [G, N]
The codes of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits up. A symmetric
weight is stored with zero points of 8: the format's loaders always apply them.
"""

import torch
from torch import Tensor

from compress.checkpoint.shards.layout import Entry
from compress.errors import CheckpointError, RecipeError
from compress.formats.awq.config import METHOD, quantization_config, read_schemes
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
    matrix_shape,
)
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

NAME = METHOD
# What a quantized module's tensors are called below its path.
PARTS = ("qweight", "qzeros", "scales")
# Groups that gptqmodel's kernels take, beside one a channel.
GROUPS = (16, 32, 64, 128)
_BITS, _WORD, _ZERO = 4, 8, 8
# Which two of eight columns are low and high half of each byte of a word.
_BYTES = ((0, 2), (4, 6), (1, 3), (5, 7))

__all__ = [
    "GROUPS",
    "NAME",
    "PARTS",
    "beside",
    "decode",
    "encode",
    "gather",
    "layout",
    "quantization_config",
    "read_schemes",
    "weight_shape",
    "why_not",
]


def why_not(
    scheme: QuantScheme, shape: tuple[int, int] | None = None, *, g_idx: bool = False
) -> str | None:
    """Why the format cannot hold a weight (N, K), and what can; None when it can.

    g_idx: act-order "group".
    """
    if scheme.type == "float" or scheme.activation is not None:
        return (
            f"it holds integer weights with unquantized inputs, not {scheme.describe()}; use"
            " compressed-tensors"
        )
    if scheme.bits != _BITS:
        return f"it holds {_BITS} bits, not {scheme.bits}; use gptq or compressed-tensors"
    if g_idx:
        return "it has no act-order; use gptq"
    if scheme.granularity not in ("channel", "group"):
        return (
            f"it has one scale a channel or a group, not {scheme.describe()}; use"
            " compressed-tensors, or quantize with granularity 'channel'"
        )
    if scheme.granularity == "group" and scheme.group_size not in GROUPS:
        sizes = ", ".join(str(size) for size in GROUPS)
        return f"its loaders take groups of {sizes}, not of {scheme.group_size}; use gptq"
    if shape is not None and shape[0] % _WORD:
        return (
            f"rows of a weight are packed by {_WORD}, which does not divide {shape[0]}; use"
            " compressed-tensors, or leave the layer out"
        )
    if shape is not None and shape[1] % scheme.columns_per_scale(shape[1]):
        return (
            f"its loaders take no short group: {scheme.group_size} does not divide {shape[1]}"
            " columns; use gptq"
        )
    return None


def layout(how: WeightStorage) -> list[Entry]:
    """Exact (name, dtype code, shape) of every tensor that `encode` will return.

    Scales are fp16 and everything lies [K, N], whatever the source has. RecipeError for a scheme
    that has no place here.
    """
    module, (n, k) = module_of(how.name), how.shape
    _refuse(how)
    groups = how.scheme.groups(k)
    return [
        (f"{module}.qweight", "I32", (k, n // _WORD)),
        (f"{module}.qzeros", "I32", (groups, n // _WORD)),
        (f"{module}.scales", "F16", (groups, n)),
    ]


def encode(how: WeightStorage, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Tensors to write, keyed and ordered as `layout` says. tensor: with scales in fp16."""
    module = module_of(how.name)
    how.expect(tensor)
    _refuse(how)
    assert tensor.scale.dtype == torch.float16, f"{how.name}: scales are {tensor.scale.dtype}"
    zero = torch.zeros_like(tensor.scale, dtype=torch.int8) if tensor.zero is None else tensor.zero
    return {
        f"{module}.qweight": _pack(tensor.codes),
        f"{module}.qzeros": _pack(zero),
        f"{module}.scales": tensor.scale.t().contiguous(),
    }


def decode(name: str, scheme: QuantScheme, has: Has, read: Read) -> QuantizedTensor:
    """The weight called `name`, from the tensors `encode` or another tool wrote for it.

    has, read: the checkpoint's names and its reader. CheckpointError when a part is missing or not
    what it must be.
    """
    stored = Stored(module_of(name), scheme, has, read)
    parts = gather(stored)
    rest = beside(stored, parts)
    return rest.around(_unpack(parts["qweight"]), parts["scales"].t().contiguous(), scheme)


def gather(stored: Stored) -> Parts:
    """All tensors of a module, each of the dtype and shape that its scheme needs.

    CheckpointError for what does not fit; values are not looked at.
    """
    scheme, words = stored.scheme, stored.get("qweight", WORDS)
    n, k = words.shape[1] * _WORD, words.shape[0]
    if n == 0 or k == 0 or k % scheme.columns_per_scale(k):
        raise CheckpointError(
            f"tensor {stored.module}.qweight is {list(words.shape)}, a weight of {k} columns, which"
            f" {scheme.describe()} does not divide; group_size in quantization_config is wrong"
        )
    groups = scheme.groups(k)
    return {
        "qweight": words,
        "scales": stored.get("scales", HALVES, (groups, n)),
        "qzeros": stored.get("qzeros", WORDS, (groups, n // _WORD)),
    }


def beside(stored: Stored, parts: Parts) -> Beside:
    """What the weight has beside codes and scales. CheckpointError for values that cannot be."""
    zero = _unpack(parts["qzeros"])
    if stored.scheme.symmetric:
        _require_middle(stored, zero)
        return Beside()
    return Beside(zero=zero)


def weight_shape(module: str, scheme: QuantScheme, shape_of: ShapeOf) -> tuple[int, int]:
    """(N, K) of a quantized weight, from the shape of its codes; CheckpointError without them."""
    k, words = matrix_shape(module, scheme, "qweight", shape_of)
    return words * _WORD, k


def _pack(codes: Tensor) -> Tensor:
    """codes: int8 [N, K], signed -> int32 [K, N / 8].

    Bytes are merged where they lie and words turned last: three times as fast as turning codes.
    """
    n, k = codes.shape
    unsigned = codes.contiguous().view(torch.uint8) + _ZERO  # wraps: -8 -> 0
    assert not codes.numel() or int(unsigned.max()) < 1 << _BITS, "a code is out of range"
    eights = unsigned.view(n // _WORD, _WORD, k)
    words = unsigned.new_empty(n // _WORD, k, 4)
    for i, (low, high) in enumerate(_BYTES):
        words[:, :, i] = eights[:, low] | (eights[:, high] << _BITS)
    return words.view(torch.int32).squeeze(-1).t().contiguous()


def _unpack(words: Tensor) -> Tensor:
    """Inverse of `_pack`: int32 [K, N / 8] -> int8 [N, K]."""
    k, eighth = words.shape
    flat = words.t().reshape(-1)  # one row turned keeps strides that no view of bytes takes
    merged = flat.view(torch.uint8).view(eighth, k, 4)
    codes = merged.new_empty(eighth, _WORD, k)
    for i, (low, high) in enumerate(_BYTES):
        both = merged[:, :, i].contiguous()
        codes[:, low] = (both & 15) - _ZERO  # wraps: 0 -> -8
        codes[:, high] = (both >> _BITS) - _ZERO
    return codes.view(torch.int8).view(eighth * _WORD, k)


def _require_middle(stored: Stored, zero: Tensor) -> None:
    if bool((zero != 0).any()):
        raise CheckpointError(
            f"tensor {stored.module}.qzeros holds zero points other than 8 though zero_point is"
            " false in quantization_config, and loaders differ in which they follow; make it true"
        )


def _refuse(how: WeightStorage) -> None:
    if (found := why_not(how.scheme, how.shape, g_idx=how.act_order)) is not None:
        raise RecipeError(f"{how.name}: format {NAME!r}: {found}")
