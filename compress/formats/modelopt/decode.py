"""ModelOpt's layout of one weight, read: what we wrote and what ModelOpt writes.

A pre_quant_scale [K] beside the weight: the runtime multiplies the inputs by it before anything
else. So it becomes QuantizedTensor.input_factor: the dequantized weight has its columns multiplied
by it, and inputs are rounded after the multiplication. Nothing of it is lost or counted twice.
"""

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.formats.modelopt.encode import is_int4, is_static, stored_scale_shape
from compress.formats.names import module_of
from compress.formats.stored import (
    E4M3,
    HALVES,
    Beside,
    Has,
    Parts,
    Read,
    ShapeOf,
    Stored,
    matrix_shape,
    positive,
)
from compress.quant.fp4 import unpack_fp4
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import InputQuantization, QuantizedTensor

_NUMBERS = ("weight_scale_2", "input_scale")


def decode(name: str, scheme: QuantScheme, has: Has, read: Read) -> QuantizedTensor:
    """The weight called `name`, from the tensors `encode` or ModelOpt wrote for it.

    has, read: the checkpoint's names and its reader. CheckpointError when a part is missing or not
    what it must be.
    """
    stored = Stored(module_of(name), scheme, has, read)
    parts = gather(stored)
    n, k = _shape(scheme, parts)
    scale = parts["weight_scale"].reshape(scheme.scale_shape(n, k))
    if scheme.type == "float" and scale.numel() == 1 and not scheme.is_fp4:
        positive(stored.at("weight_scale"), parts["weight_scale"])
    return beside(stored, parts).around(_codes(scheme, parts["weight"]), scale, scheme)


def gather(stored: Stored) -> Parts:
    """All tensors of a module, each of the dtype and shape that its scheme needs.

    CheckpointError for what does not fit; values are not looked at.
    """
    scheme = stored.scheme
    parts = {"weight": stored.get("weight", _code_dtypes(scheme))}
    n, k = _shape(scheme, parts)
    if scheme.granularity == "group" and k % scheme.group_size:
        raise CheckpointError(
            f"{stored.module}: its {k} columns divide by no group of {scheme.group_size};"
            f" group_size in quantization_config or {stored.module}.weight is wrong"
        )
    parts["weight_scale"] = _scale(stored, (n, k))
    if scheme.is_fp4:
        parts["weight_scale_2"] = stored.number("weight_scale_2")
    # Beside NVFP4 weights it is of FP4 inputs, which no scheme of ours says.
    if is_static(scheme) or (scheme.is_fp4 and stored.holds("input_scale")):
        parts["input_scale"] = stored.number("input_scale")
    if stored.holds("pre_quant_scale"):
        parts["pre_quant_scale"] = stored.get("pre_quant_scale", HALVES, (k,))
    return parts


def beside(stored: Stored, parts: Parts) -> Beside:
    """What the weight has beside codes and scales. CheckpointError for values that cannot be."""
    found = {part: positive(stored.at(part), parts[part]) for part in _NUMBERS if part in parts}
    factor = found.get("weight_scale_2")
    return Beside(
        input_scale=found.get("input_scale") if is_static(stored.scheme) else None,
        global_factor=None if factor is None else factor.float(),
        input_factor=input_factor(stored),
    )


def inputs(module: str, scheme: QuantScheme, has: Has, read: Read) -> InputQuantization | None:
    """How a module's inputs are rounded: with their scale [1] where that is static, after their
    factor [K] where there is one."""
    if scheme.activation is None:
        return None
    stored, scale = Stored(module, scheme, has, read), None
    if is_static(scheme):
        scale = positive(stored.at("input_scale"), stored.number("input_scale"))
    return InputQuantization(scheme.activation, scale, None, input_factor(stored))


def input_factor(stored: Stored) -> Tensor | None:
    """What a module's inputs are multiplied by, [K]; None where it is 1.

    CheckpointError for anything but positive numbers.
    """
    if not stored.holds("pre_quant_scale"):
        return None
    name = stored.at("pre_quant_scale")
    factor = stored.read(name)
    good = factor.dtype in HALVES and factor.dim() == 1
    if not good or not bool((factor > 0).all() & torch.isfinite(factor).all()):
        raise CheckpointError(
            f"tensor {name} is {str(factor.dtype).removeprefix('torch.')} {list(factor.shape)} with"
            f" {factor.flatten()[:4].tolist()}; it must hold a positive number for each of the"
            " columns of the weight"
        )
    return None if bool((factor == 1).all()) else factor


def weight_shape(module: str, scheme: QuantScheme, shape_of: ShapeOf) -> tuple[int, int]:
    """(N, K) of a quantized weight; CheckpointError when it is missing or no matrix."""
    rows, columns = matrix_shape(module, scheme, "weight", shape_of)
    if scheme.is_fp4:
        return rows, 2 * columns
    return (2 * rows, columns) if is_int4(scheme) else (rows, columns)


def unpack_rows(packed: Tensor) -> Tensor:
    """int8 codes [N, K] of uint8 [N / 2, K]."""
    nibbles = torch.stack([packed & 0x0F, packed >> 4], dim=1)  # [N / 2, 2, K]
    return ((nibbles ^ 8).to(torch.int8) - 8).flatten(0, 1)


def _code_dtypes(scheme: QuantScheme) -> tuple[torch.dtype, ...]:
    if scheme.is_fp4 or is_int4(scheme):
        return (torch.uint8,)
    return (torch.int8,) if scheme.type == "int" else E4M3


def _shape(scheme: QuantScheme, parts: Parts) -> tuple[int, int]:
    """(N, K) of the weight whose codes are among the parts."""
    rows, columns = parts["weight"].shape
    if scheme.is_fp4:
        return rows, 2 * columns
    return (2 * rows, columns) if is_int4(scheme) else (rows, columns)


def _codes(scheme: QuantScheme, stored: Tensor) -> Tensor:
    """[N, K]."""
    if scheme.is_fp4:
        return unpack_fp4(stored)
    return unpack_rows(stored) if is_int4(scheme) else stored


def _scale(stored: Stored, shape: tuple[int, int]) -> Tensor:
    """Of a shape that ModelOpt has for it."""
    scheme = stored.scheme
    wanted = scheme.scale_shape(*shape)
    if scheme.is_fp4:
        return stored.get("weight_scale", E4M3, wanted)
    if scheme.granularity == "tensor" or (scheme.granularity == "block" and wanted == (1, 1)):
        return stored.number("weight_scale")
    if is_int4(scheme):
        return _grouped(stored, wanted)
    return stored.get("weight_scale", HALVES, stored_scale_shape(scheme, shape))


def _grouped(stored: Stored, wanted: tuple[int, int]) -> Tensor:
    name = stored.at("weight_scale")
    scale = stored.read(name) if stored.has(name) else None
    if scale is not None and scale.dim() == 2 and tuple(scale.shape) != wanted:
        raise CheckpointError(
            f"tensor {name} is {list(scale.shape)} where groups of {stored.scheme.group_size} need"
            f" {list(wanted)}; group_size is missing or wrong in config.json's quantization_config"
            " (ModelOpt writes it to hf_quant_config.json): set it there"
        )
    return stored.get("weight_scale", HALVES, wanted)
