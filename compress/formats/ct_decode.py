"""The compressed-tensors layout of one weight, read: what we wrote and what other tools write.

Nothing about the tensors is taken on trust: dtypes and shapes must be those of the scheme that
quantization_config gives, or a CheckpointError names the module.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.formats.compressed_tensors import is_static
from compress.formats.fp4 import unpack_fp4
from compress.formats.names import module_of
from compress.quant.packing import unpack, words_for
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import InputQuantization, QuantizedTensor

_SCALES = (torch.bfloat16, torch.float16, torch.float32)
_E4M3 = (torch.float8_e4m3fn,)
_WORDS = (torch.int32,)
_WHOLE = (torch.int32, torch.int64)

Has = Callable[[str], bool]
Read = Callable[[str], Tensor]


def decode(name: str, scheme: QuantScheme, has: Has, read: Read) -> QuantizedTensor:
    """The weight called `name`, from the tensors `encode` or another tool wrote for it.

    has, read: the checkpoint's names and its reader. CheckpointError when a part is missing or of
    the wrong dtype or shape.
    """
    parts = _Parts(module_of(name), scheme, has, read)
    inputs = input_scale(parts.module, has, read) if is_static(scheme.activation) else None
    if scheme.is_fp4:
        return _nvfp4(parts, inputs)
    packed = has(f"{parts.module}.weight_packed") and scheme.type == "int"
    codes = _packed_codes(parts) if packed else _plain_codes(parts)
    n, k = codes.shape
    scales = scheme.scale_shape(n, k)
    scale = parts.expect("weight_scale", scales, _SCALES)
    if scheme.symmetric and has(f"{parts.module}.weight_zero_point"):
        _refuse_zeros(parts, packed, scales)
    zero = None if scheme.symmetric else _zero(parts, packed, scales)
    g_idx = _g_idx(parts, k, scales[1]) if has(f"{parts.module}.weight_g_idx") else None
    return QuantizedTensor(codes, scale, zero, g_idx, scheme, input_scale=inputs)


def input_scale(module: str, has: Has, read: Read) -> Tensor:
    """The static input scale of a module: [1], whatever shape it is stored in."""
    return one_number(f"{module}.input_scale", "static input scales", has, read)


def inputs(module: str, scheme: QuantScheme, has: Has, read: Read) -> InputQuantization | None:
    """How a module's inputs are quantized, with their scale [1] where that is static."""
    act = scheme.activation
    if act is None or not is_static(act):
        return None if act is None else InputQuantization(act)
    return InputQuantization(act, input_scale(module, has, read))


def one_number(name: str, what: str, has: Has, read: Read) -> Tensor:
    """One positive number of a floating dtype: [1]. what: needs it, for the message (plural)."""
    if not has(name):
        raise CheckpointError(
            f"{what} need tensor {name}, which is missing; the checkpoint is incomplete or its"
            " quantization_config is wrong"
        )
    value = read(name)
    good = value.dtype in _SCALES and value.numel() == 1
    if not good or not bool((value > 0).all() & torch.isfinite(value).all()):
        raise CheckpointError(
            f"tensor {name} is {value.dtype} {list(value.shape)} with"
            f" {value.flatten()[:4].tolist()}; it must hold one positive number"
        )
    return value.reshape(1)


class _Parts:
    """The tensors of one module, read by name and checked against what is expected."""

    def __init__(self, module: str, scheme: QuantScheme, has: Has, read: Read) -> None:
        self.module, self.scheme = module, scheme
        self._has, self._read = has, read

    def get(self, suffix: str) -> Tensor:
        name = f"{self.module}.{suffix}"
        if not self._has(name):
            raise CheckpointError(
                f"{self.module}: {self.scheme.describe()} needs tensor {name}, which is missing;"
                " the checkpoint is incomplete or its quantization_config is wrong"
            )
        return self._read(name)

    def number(self, suffix: str) -> Tensor:
        what = f"{self.module}: {self.scheme.describe()} weights"
        return one_number(f"{self.module}.{suffix}", what, self._has, self._read)

    def expect(
        self, suffix: str, shape: tuple[int, int], dtypes: tuple[torch.dtype, ...]
    ) -> Tensor:
        """A matrix; one number a tensor comes as [] or [1], one a row as [N] from some tools."""
        values = self.get(suffix)
        where = f"{self.module}: {self.module}.{suffix} is"
        if values.dtype not in dtypes:
            names = " or ".join(str(dtype) for dtype in dtypes)
            raise CheckpointError(
                f"{where} {values.dtype} where its scheme in quantization_config needs {names};"
                " the two do not belong together"
            )
        matrix = values if values.dim() == 2 else values.reshape(-1, 1)
        if tuple(matrix.shape) != shape:
            raise CheckpointError(
                f"{where} {list(values.shape)} where its scheme in quantization_config needs"
                f" {list(shape)}; the two do not belong together"
            )
        return matrix


def _nvfp4(parts: _Parts, inputs: Tensor | None) -> QuantizedTensor:
    packed = parts.get("weight_packed")
    if packed.dtype != torch.uint8 or packed.dim() != 2:
        raise CheckpointError(
            f"{parts.module}: {parts.module}.weight_packed is {packed.dtype}"
            f" {list(packed.shape)}; NVFP4 needs uint8 [N, K / 2]"
        )
    n, k = packed.shape[0], 2 * packed.shape[1]
    if k % parts.scheme.group_size:
        raise CheckpointError(
            f"{parts.module}: {parts.module}.weight_packed holds {k} columns, no multiple of"
            f" NVFP4's groups of {parts.scheme.group_size}"
        )
    scale = parts.expect("weight_scale", parts.scheme.scale_shape(n, k), _E4M3)
    whole = parts.number("weight_global_scale").float()
    codes = unpack_fp4(packed)
    return QuantizedTensor(codes, scale, None, None, parts.scheme, whole, inputs)


def _packed_codes(parts: _Parts) -> Tensor:
    n, k = shape_from(parts.get("weight_shape"), parts.module)
    bits = parts.scheme.bits
    return unpack(parts.expect("weight_packed", (n, words_for(k, bits)), _WORDS), bits, k)


def _plain_codes(parts: _Parts) -> Tensor:
    weight = parts.get("weight")
    needed = torch.int8 if parts.scheme.type == "int" else torch.float8_e4m3fn
    if weight.dtype != needed or weight.dim() != 2:
        raise CheckpointError(
            f"{parts.module}.weight is {weight.dtype} {list(weight.shape)} where its scheme needs"
            f" {str(needed).removeprefix('torch.')} codes [N, K]; the two do not belong together"
        )
    return weight


def shape_from(values: Tensor, module: str) -> tuple[int, int]:
    """(N, K) out of a weight_shape tensor; CheckpointError when it holds no such thing."""
    if values.dtype not in _WHOLE or values.shape != (2,) or bool((values < 1).any()):
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


def _g_idx(parts: _Parts, columns: int, groups: int) -> Tensor | None:
    values = parts.get("weight_g_idx")
    if values.dtype not in _WHOLE or values.shape != (columns,):
        raise CheckpointError(
            f"tensor {parts.module}.weight_g_idx is {values.dtype} {list(values.shape)}; it must be"
            f" int32 [{columns}], the group of every column"
        )
    if bool((values == -1).all()):  # what compressed-tensors leaves where no order was chosen
        return None
    if bool(((values < 0) | (values >= groups)).any()):
        raise CheckpointError(
            f"tensor {parts.module}.weight_g_idx holds groups {int(values.min())} to"
            f" {int(values.max())}; there are scales for 0 to {groups - 1}"
        )
    return values


def _zero(parts: _Parts, packed: bool, scales: tuple[int, int]) -> Tensor:
    """int8 zero points [N, G] from either stored form."""
    if packed and parts.scheme.granularity != "tensor":
        (n, groups), bits = scales, parts.scheme.bits
        words = parts.expect("weight_zero_point", (words_for(n, bits), groups), _WORDS)
        return unpack(words.t().contiguous(), bits, n).t().contiguous()
    return parts.expect("weight_zero_point", scales, (torch.int8, *_WHOLE)).to(torch.int8)


def _refuse_zeros(parts: _Parts, packed: bool, scales: tuple[int, int]) -> None:
    """Some tools store the zero points of symmetric weights; any but 0 mean another scheme."""
    zeros = parts.get("weight_zero_point")
    if packed and zeros.dtype == torch.int32:
        zeros = _zero(parts, packed, scales)
    if bool(zeros.any()):
        raise CheckpointError(
            f"tensor {parts.module}.weight_zero_point holds zero points other than 0 though"
            " quantization_config says symmetric; the two do not belong together"
        )
