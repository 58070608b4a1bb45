"""ModelOpt's layout of one weight, read: what we wrote and what ModelOpt writes.

A pre_quant_scale [K] beside the weight: the runtime multiplies the inputs by it before anything
else. So it becomes QuantizedTensor.input_factor: the dequantized weight has its columns multiplied
by it, and inputs are rounded after the multiplication. Nothing of it is lost or counted twice.
"""

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.formats.ct_decode import one_number
from compress.formats.fp4 import unpack_fp4
from compress.formats.modelopt import is_int4, is_static, stored_scale_shape
from compress.formats.names import module_of
from compress.formats.stored import HALVES, Has, Read, ShapeOf, Stored, matrix_shape
from compress.quant.scheme import FP4_GROUP, QuantScheme
from compress.quant.tensor import InputQuantization, QuantizedTensor

_E4M3 = (torch.float8_e4m3fn,)


def decode(name: str, scheme: QuantScheme, has: Has, read: Read) -> QuantizedTensor:
    """The weight called `name`, from the tensors `encode` or ModelOpt wrote for it.

    has, read: the checkpoint's names and its reader. CheckpointError when a part is missing or not
    what it must be.
    """
    stored = Stored(module_of(name), scheme, has, read)
    codes, factor = _codes(stored), None
    n, k = codes.shape
    if scheme.is_fp4:
        scale = stored.get("weight_scale", _E4M3, (n, k // FP4_GROUP))
        factor = _number(stored, "weight_scale_2").float()
    else:
        scale = _scale(stored, (n, k))
    found = inputs(stored.module, scheme, has, read)
    return QuantizedTensor(
        codes,
        scale,
        None,
        None,
        scheme,
        input_scale=None if found is None else found.scale,
        global_factor=factor,
        input_factor=input_factor(stored.module, k, has, read),
    )


def inputs(module: str, scheme: QuantScheme, has: Has, read: Read) -> InputQuantization | None:
    """How a module's inputs are rounded: with their scale [1] where that is static, after their
    factor [K] where there is one."""
    if scheme.activation is None:
        return None
    stored = Stored(module, scheme, has, read)
    scale = _number(stored, "input_scale") if is_static(scheme) else None
    return InputQuantization(scheme.activation, scale, None, input_factor(module, None, has, read))


def input_factor(module: str, columns: int | None, has: Has, read: Read) -> Tensor | None:
    """What a module's inputs are multiplied by, [K]; None where it is 1.

    columns: K, None when it is not known. CheckpointError for anything but K positive numbers.
    """
    name = f"{module}.pre_quant_scale"
    if not has(name):
        return None
    factor = read(name)
    good = factor.dtype in HALVES and factor.dim() == 1
    good = good and (columns is None or factor.shape[0] == columns)
    if not good or not bool((factor > 0).all() & torch.isfinite(factor).all()):
        raise CheckpointError(
            f"tensor {name} is {str(factor.dtype).removeprefix('torch.')} {list(factor.shape)} with"
            f" {factor.flatten()[:4].tolist()}; it must hold a positive number for each of the"
            f" {'' if columns is None else f'{columns} '}columns of the weight"
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


def _codes(stored: Stored) -> Tensor:
    """[N, K]."""
    scheme = stored.scheme
    if scheme.is_fp4:
        codes = unpack_fp4(stored.get("weight", (torch.uint8,)))
    elif is_int4(scheme):
        codes = unpack_rows(stored.get("weight", (torch.uint8,)))
    else:
        return stored.get("weight", (torch.int8,) if scheme.type == "int" else _E4M3)
    if codes.shape[1] % scheme.group_size:
        raise CheckpointError(
            f"{stored.module}: its {codes.shape[1]} columns divide by no group of"
            f" {scheme.group_size}; group_size in quantization_config or {stored.module}.weight is"
            " wrong"
        )
    return codes


def _scale(stored: Stored, shape: tuple[int, int]) -> Tensor:
    """[N, G] or [1, 1] from the shapes that ModelOpt has for it."""
    scheme = stored.scheme
    wanted = scheme.scale_shape(*shape)
    if scheme.granularity == "tensor" or (scheme.granularity == "block" and wanted == (1, 1)):
        return _number(stored, "weight_scale").reshape(1, 1)
    if is_int4(scheme):
        return _grouped(stored, wanted)
    scale = stored.get("weight_scale", HALVES, stored_scale_shape(scheme, shape))
    return scale.reshape(wanted)


def _grouped(stored: Stored, wanted: tuple[int, int]) -> Tensor:
    name = f"{stored.module}.weight_scale"
    scale = stored.read(name) if stored.has(name) else None
    if scale is not None and scale.dim() == 2 and tuple(scale.shape) != wanted:
        raise CheckpointError(
            f"tensor {name} is {list(scale.shape)} where groups of {stored.scheme.group_size} need"
            f" {list(wanted)}; group_size is missing or wrong in config.json's quantization_config"
            " (ModelOpt writes it to hf_quant_config.json): set it there"
        )
    return stored.get("weight_scale", HALVES, wanted)


def _number(stored: Stored, part: str) -> Tensor:
    what = f"{stored.module}: {stored.scheme.describe()} weights"
    return one_number(f"{stored.module}.{part}", what, stored.has, stored.read)
