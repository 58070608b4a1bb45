"""The compressed-tensors layout of one weight, both ways (read by vLLM and transformers).

`x.weight` [N, K] becomes, for weight-only schemes ("pack-quantized"):
    x.weight_packed      int32 [N, ceil(K * bits / 32)]   see compress.quant.packing
    x.weight_scale       [N, G]; [N, 1] per channel; [1] per tensor
    x.weight_shape       int64 [2] = (N, K)
    x.weight_zero_point  asymmetric only: int32 [ceil(N * bits / 32), G], packed along N;
                         int8 [1] per tensor
    x.weight_g_idx       act-order "group" only: int32 [K]
and, when activations are quantized too ("int-quantized"): x.weight int8 [N, K], x.weight_scale,
x.weight_zero_point (int8, asymmetric only).

Other tensors of the module (bias) are not touched. A Conv1D weight is stored in this [N, K] order
as well; its module is then named in the config (see quantization_config).

Version notes: widths 3, 5, 6 and 7 need compressed-tensors 0.18 (older ones unpack them wrongly);
0.19 and later refuse g_idx.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from compress.errors import CheckpointError, RecipeError
from compress.quant.packing import pack, unpack, words_for
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

NAME = "compressed-tensors"
# What a quantized module's tensors are called below its path.
PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")

_WORDS = (torch.int32,)
_SCALES = (torch.bfloat16, torch.float16, torch.float32)
_WHOLE = (torch.int32, torch.int64)

Entry = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype code, shape


def module_of(name: str) -> str:
    """Module path of a weight: "a.b.weight" -> "a.b"; a CheckpointError for any other name."""
    if not name.endswith(".weight"):
        raise CheckpointError(
            f"tensor {name!r} cannot be stored in {NAME}: only names that end in '.weight' have a"
            " place for scales there; ignore it, or use format 'dense'"
        )
    return name.removesuffix(".weight")


def is_packed(scheme: QuantScheme) -> bool:
    """Whether codes go into words (weight-only) or stay int8 (activations are integers too)."""
    return scheme.activation is None


def layout(
    name: str,
    shape: tuple[int, int],
    scheme: QuantScheme,
    scale_dtype: str,
    *,
    act_order: bool = False,
    transposed: bool = False,
) -> list[Entry]:
    """Exact (name, dtype code, shape) of every tensor that `encode` will return.

    shape: logical (N, K). scale_dtype: safetensors code of the scale. act_order: a g_idx is
    stored. transposed: how the source stores the weight; here the order is [N, K] either way.
    """
    n, k = shape
    module = module_of(name)
    _refuse_g_idx(name, scheme, act_order)
    per_tensor = scheme.granularity == "tensor"
    scales: tuple[int, ...] = (1,) if per_tensor else (n, scheme.groups(k))
    scale: Entry = (f"{module}.weight_scale", scale_dtype, scales)
    if not is_packed(scheme):
        entries: list[Entry] = [(name, "I8", (n, k)), scale]
        if not scheme.symmetric:
            entries.append((f"{module}.weight_zero_point", "I8", scales))
        return entries
    entries = [
        (f"{module}.weight_packed", "I32", (n, words_for(k, scheme.bits))),
        scale,
        (f"{module}.weight_shape", "I64", (2,)),
    ]
    if not scheme.symmetric and per_tensor:
        entries.append((f"{module}.weight_zero_point", "I8", scales))
    elif not scheme.symmetric:
        packed = (words_for(n, scheme.bits), scheme.groups(k))
        entries.append((f"{module}.weight_zero_point", "I32", packed))
    if act_order:
        entries.append((f"{module}.weight_g_idx", "I32", (k,)))
    return entries


def encode(name: str, tensor: QuantizedTensor, *, transposed: bool = False) -> dict[str, Tensor]:
    """Tensors to write for the weight called `name`, keyed and ordered as `layout` says."""
    module, scheme = module_of(name), tensor.scheme
    _refuse_g_idx(name, scheme, tensor.g_idx is not None)
    per_tensor = scheme.granularity == "tensor"
    scale = tensor.scale.reshape(1) if per_tensor else tensor.scale
    if is_packed(scheme):
        parts = {
            f"{module}.weight_packed": pack(tensor.codes, scheme.bits),
            f"{module}.weight_scale": scale.contiguous(),
            f"{module}.weight_shape": torch.tensor(tensor.shape, dtype=torch.int64),
        }
    else:
        parts = {name: tensor.codes, f"{module}.weight_scale": scale.contiguous()}
    if tensor.zero is not None:
        zero = tensor.zero.reshape(1) if per_tensor else tensor.zero
        if is_packed(scheme) and not per_tensor:
            zero = pack(zero.t(), scheme.bits).t()  # zero: [G, N] -> words [ceil(N * b / 32), G]
        parts[f"{module}.weight_zero_point"] = zero.contiguous()
    if tensor.g_idx is not None:
        parts[f"{module}.weight_g_idx"] = tensor.g_idx.to(torch.int32)
    return parts


def decode(
    name: str, scheme: QuantScheme, has: Callable[[str], bool], read: Callable[[str], Tensor]
) -> QuantizedTensor:
    """The weight called `name`, from the tensors `encode` or another tool wrote for it.

    has, read: the checkpoint's names and its reader. CheckpointError when a part is missing or of
    the wrong shape.
    """
    module = module_of(name)

    def part(suffix: str) -> Tensor:
        if not has(f"{module}.{suffix}"):
            raise CheckpointError(
                f"{module}: {scheme.describe()} needs tensor {module}.{suffix}, which is missing;"
                " the checkpoint is incomplete or its quantization_config is wrong"
            )
        return read(f"{module}.{suffix}")

    packed = has(f"{module}.weight_packed")
    if packed:
        n, k = shape_from(part("weight_shape"), module)
        words = _expect(part("weight_packed"), (n, words_for(k, scheme.bits)), module, _WORDS)
        codes = unpack(words, scheme.bits, k)
    else:
        codes = _int8_codes(part("weight"), module)
        n, k = codes.shape
    scales = (1, 1) if scheme.granularity == "tensor" else (n, scheme.groups(k))
    scale = _expect(_as_matrix(part("weight_scale")), scales, module, _SCALES)
    zero = None
    if not scheme.symmetric:
        zero = _zero(part("weight_zero_point"), scheme, packed, scales, module)
    g_idx = None
    if has(f"{module}.weight_g_idx"):
        g_idx = _g_idx(part("weight_g_idx"), k, scales[1], module)
    return QuantizedTensor(codes, scale, zero, g_idx, scheme)


def shape_from(values: Tensor, module: str) -> tuple[int, int]:
    """(N, K) out of a weight_shape tensor; CheckpointError when it holds no such thing."""
    if values.dtype not in _WHOLE or values.shape != (2,) or bool((values < 1).any()):
        raise CheckpointError(
            f"tensor {module}.weight_shape is {values.dtype} {values.flatten()[:4].tolist()}; it"
            " must hold two whole numbers, the rows and columns of the weight"
        )
    return int(values[0]), int(values[1])


def _g_idx(values: Tensor, columns: int, groups: int, module: str) -> Tensor | None:
    if values.dtype not in _WHOLE or values.shape != (columns,):
        raise CheckpointError(
            f"tensor {module}.weight_g_idx is {values.dtype} {list(values.shape)}; it must be int32"
            f" [{columns}], the group of every column"
        )
    if bool((values == -1).all()):  # what compressed-tensors leaves where no order was chosen
        return None
    if bool(((values < 0) | (values >= groups)).any()):
        raise CheckpointError(
            f"tensor {module}.weight_g_idx holds groups {int(values.min())} to {int(values.max())};"
            f" there are scales for 0 to {groups - 1}"
        )
    return values


def _zero(
    stored: Tensor, scheme: QuantScheme, packed: bool, scales: tuple[int, int], module: str
) -> Tensor:
    """int8 zero points [N, G] from either stored form."""
    if packed and scheme.granularity != "tensor":
        n, groups = scales
        words = _expect(stored, (words_for(n, scheme.bits), groups), module, _WORDS)
        return unpack(words.t().contiguous(), scheme.bits, n).t().contiguous()
    return _expect(_as_matrix(stored), scales, module, (torch.int8, *_WHOLE)).to(torch.int8)


def _int8_codes(weight: Tensor, module: str) -> Tensor:
    if weight.dtype != torch.int8 or weight.dim() != 2:
        raise CheckpointError(
            f"{module}.weight is {weight.dtype} {list(weight.shape)} where its scheme needs int8"
            " codes [N, K]; this version reads integer layouts only"
        )
    return weight


def _as_matrix(values: Tensor) -> Tensor:
    """Scales of one per tensor come as [] or [1], of one per row as [N] from some tools."""
    return values if values.dim() == 2 else values.reshape(-1, 1)


def _expect(
    values: Tensor, shape: tuple[int, int], module: str, dtypes: tuple[torch.dtype, ...]
) -> Tensor:
    if values.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise CheckpointError(
            f"{module}: a quantization tensor is {values.dtype} where its scheme in"
            f" quantization_config needs {names}; the two do not belong together"
        )
    if tuple(values.shape) != shape:
        raise CheckpointError(
            f"{module}: a quantization tensor is {list(values.shape)} where its scheme in"
            f" quantization_config needs {list(shape)}; the two do not belong together"
        )
    return values


def _refuse_g_idx(name: str, scheme: QuantScheme, act_order: bool) -> None:
    if act_order and (scheme.granularity != "group" or not is_packed(scheme)):
        raise RecipeError(
            f"{name}: act_order 'group' needs a weight-only scheme with groups, this one is"
            f" {scheme.describe()}; use act_order 'static' or 'none'"
        )
