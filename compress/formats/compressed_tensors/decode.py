"""The compressed-tensors layout of one weight, read: what we wrote and what other tools write.

Nothing about the tensors is taken on trust: dtypes and shapes must be those of the scheme that
quantization_config gives, or a CheckpointError names the tensor.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.formats.compressed_tensors.encode import is_static
from compress.formats.names import module_of
from compress.formats.stored import (
    E4M3,
    HALVES,
    INDICES,
    WORDS,
    Beside,
    Has,
    Parts,
    Read,
    Stored,
    group_order,
    missing,
    positive,
)
from compress.quant.fp4 import unpack_fp4
from compress.quant.packing import unpack, words_for
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import InputQuantization, QuantizedTensor

_NUMBERS = ("weight_global_scale", "input_scale")
_ZERO_DTYPES = (torch.int8, *INDICES)


def decode(name: str, scheme: QuantScheme, has: Has, read: Read) -> QuantizedTensor:
    """The weight called `name`, from the tensors `encode` or another tool wrote for it.

    has, read: the checkpoint's names and its reader. CheckpointError when a part is missing or not
    what it must be.
    """
    stored = Stored(module_of(name), scheme, has, read)
    parts = gather(stored)
    rest = beside(stored, parts)
    return rest.around(_codes(stored, parts), parts["weight_scale"], scheme)


def gather(stored: Stored) -> Parts:
    """All tensors of a module, each of the dtype and shape that its scheme needs.

    Of values only those of weight_shape are looked at. CheckpointError for what does not fit.
    """
    scheme = stored.scheme
    parts = _fp4_parts(stored) if scheme.is_fp4 else _integer_or_e4m3_parts(stored)
    if is_static(scheme.activation):
        parts["input_scale"] = stored.number("input_scale")
        if stored.holds("input_zero_point"):
            parts["input_zero_point"] = stored.read(stored.at("input_zero_point"))
    return parts


def beside(stored: Stored, parts: Parts) -> Beside:
    """What the weight has beside codes and scales. CheckpointError for values that cannot be."""
    if "input_zero_point" in parts:
        _refuse_zeros(stored, "input_zero_point", parts["input_zero_point"])
    found = {part: positive(stored.at(part), parts[part]) for part in _NUMBERS if part in parts}
    whole = found.get("weight_global_scale")
    return Beside(
        zero=_zero(stored, parts),
        g_idx=_g_idx(stored, parts),
        global_scale=None if whole is None else whole.float(),
        input_scale=found.get("input_scale"),
    )


def inputs(module: str, scheme: QuantScheme, has: Has, read: Read) -> InputQuantization | None:
    """How a module's inputs are quantized, with their scale [1] where that is static."""
    if scheme.activation is None:
        return None
    if not is_static(scheme.activation):
        return InputQuantization(scheme.activation)
    stored = Stored(module, scheme, has, read)
    scale = positive(stored.at("input_scale"), stored.number("input_scale"))
    return InputQuantization(scheme.activation, scale)


def shape_from(values: Tensor, module: str) -> tuple[int, int]:
    """(N, K) out of a weight_shape tensor; CheckpointError when it holds no such thing."""
    if values.dtype not in INDICES or values.shape != (2,) or bool((values < 1).any()):
        raise CheckpointError(
            f"tensor {module}.weight_shape is {values.dtype} {values.flatten()[:4].tolist()}; it"
            " must hold two whole numbers, the rows and columns of the weight"
        )
    return int(values[0]), int(values[1])


def weight_shape(
    module: str, scheme: QuantScheme, shape_of: Callable[[str], tuple[int, ...] | None]
) -> tuple[int, int]:
    """(N, K) of a quantized weight without a weight_shape tensor, from its codes' shape.

    CheckpointError when there are none, or no matrix.
    """
    name = f"{module}.weight"
    shape = shape_of(name)
    if shape is None and scheme.is_fp4:
        name = f"{module}.weight_packed"
        packed = shape_of(name)
        shape = (packed[0], 2 * packed[1]) if packed is not None and len(packed) == 2 else None
    if shape is None or len(shape) != 2:
        raise CheckpointError(
            f"{module}: {scheme.describe()} needs a matrix of codes {name}, which is"
            f" {'missing' if shape is None else list(shape)}; the checkpoint is incomplete or its"
            " quantization_config is wrong"
        )
    return shape[0], shape[1]


def _fp4_parts(stored: Stored) -> dict[str, Tensor]:
    packed = stored.get("weight_packed", (torch.uint8,))
    n, k, group = packed.shape[0], 2 * packed.shape[1], stored.scheme.group_size
    if k % group:
        raise CheckpointError(
            f"{stored.module}: {stored.at('weight_packed')} holds {k} columns, no multiple of"
            f" NVFP4's groups of {group}"
        )
    return {
        "weight_packed": packed,
        "weight_scale": stored.matrix("weight_scale", E4M3, stored.scheme.scale_shape(n, k)),
        "weight_global_scale": stored.number("weight_global_scale"),
    }


def _integer_or_e4m3_parts(stored: Stored) -> dict[str, Tensor]:
    scheme = stored.scheme
    parts = _packed(stored) if _is_packed(stored) else {"weight": _plain(stored)}
    n, k = _shape(stored, parts)
    scales = scheme.scale_shape(n, k)
    parts["weight_scale"] = stored.matrix("weight_scale", HALVES, scales)
    if not scheme.symmetric or stored.holds("weight_zero_point"):
        parts["weight_zero_point"] = _stored_zeros(stored, n, scales)
    if stored.holds("weight_g_idx"):
        parts["weight_g_idx"] = stored.get("weight_g_idx", INDICES, (k,))
    return parts


def _stored_zeros(stored: Stored, n: int, scales: tuple[int, int]) -> Tensor:
    """Zero points, packed or not; of symmetric weights some tools store them in any dtype."""
    scheme = stored.scheme
    packed = _is_packed(stored) and scheme.granularity != "tensor"
    if scheme.symmetric:
        zeros = stored.read(stored.at("weight_zero_point"))
        if not (packed and zeros.dtype == torch.int32):
            return zeros
    if packed:
        return stored.matrix("weight_zero_point", WORDS, (words_for(n, scheme.bits), scales[1]))
    return stored.matrix("weight_zero_point", _ZERO_DTYPES, scales)


def _is_packed(stored: Stored) -> bool:
    """By their parts; wide integers may lie plain."""
    found = stored.holds("weight_packed") or stored.holds("weight_shape")
    return stored.scheme.type == "int" and found


def _packed(stored: Stored) -> dict[str, Tensor]:
    if not stored.holds("weight_shape"):
        raise missing(stored.module, stored.scheme, stored.at("weight_shape"))
    shape = stored.read(stored.at("weight_shape"))
    n, k = shape_from(shape, stored.module)
    codes = stored.get("weight_packed", WORDS, (n, words_for(k, stored.scheme.bits)))
    return {"weight_shape": shape, "weight_packed": codes}


def _plain(stored: Stored) -> Tensor:
    return stored.get("weight", (torch.int8,) if stored.scheme.type == "int" else E4M3)


def _shape(stored: Stored, parts: Parts) -> tuple[int, int]:
    """(N, K) of the weight whose codes are among the parts."""
    if "weight_shape" in parts:
        return shape_from(parts["weight_shape"], stored.module)
    n, k = parts["weight"].shape
    return n, k


def _codes(stored: Stored, parts: Parts) -> Tensor:
    """[N, K]."""
    scheme = stored.scheme
    if scheme.is_fp4:
        return unpack_fp4(parts["weight_packed"])
    if "weight_packed" in parts:
        return unpack(parts["weight_packed"], scheme.bits, _shape(stored, parts)[1])
    codes = parts["weight"]
    if scheme.type == "int":
        _refuse_range(stored, "weight", codes)
    return codes


def _g_idx(stored: Stored, parts: Parts) -> Tensor | None:
    values = parts.get("weight_g_idx")
    # -1 is what compressed-tensors leaves where no order was chosen.
    if values is None or bool((values == -1).all()):
        return None
    return group_order(stored.at("weight_g_idx"), values, stored.scheme)


def _zero(stored: Stored, parts: Parts) -> Tensor | None:
    """int8 zero points [N, G] from either stored form; None for a symmetric scheme."""
    zero, scheme = parts.get("weight_zero_point"), stored.scheme
    if zero is None:
        return None
    packed = "weight_packed" in parts and scheme.granularity != "tensor"
    if packed and zero.dtype == torch.int32:
        n, _ = _shape(stored, parts)
        zero = unpack(zero.t().contiguous(), scheme.bits, n).t().contiguous()
    if scheme.symmetric:
        _refuse_zeros(stored, "weight_zero_point", zero)
        return None
    _refuse_range(stored, "weight_zero_point", zero)
    return zero.to(torch.int8)


def _refuse_zeros(stored: Stored, part: str, zeros: Tensor) -> None:
    """Some tools store the zero points of symmetric numbers; any but 0 mean another scheme."""
    if bool((zeros.float() != 0).any()):
        raise CheckpointError(
            f"tensor {stored.at(part)} holds zero points other than 0 though quantization_config"
            " says symmetric; the two do not belong together"
        )


def _refuse_range(stored: Stored, part: str, values: Tensor) -> None:
    """Whole numbers that the scheme's width does not have; nothing is known without values."""
    low, high = stored.scheme.code_min, stored.scheme.code_max
    if values.is_meta or (stored.scheme.bits == 8 and values.dtype == torch.int8):
        return
    if values.numel() and (int(values.min()) < low or int(values.max()) > high):
        raise CheckpointError(
            f"tensor {stored.at(part)} holds {int(values.min())} to {int(values.max())} where"
            f" {stored.scheme.describe()} has {low} to {high}; the tensors and"
            " quantization_config do not belong together"
        )
