"""The compressed-tensors layout of one weight (read by vLLM and transformers), written.

`x.weight` [N, K] becomes, by the kind of scheme:

"pack-quantized", integers without integer activations:
    x.weight_packed      int32 [N, ceil(K * bits / 32)]   see compress.quant.packing
    x.weight_scale       [N, G]; [N, 1] per channel; [1] per tensor
    x.weight_shape       int64 [2] = (N, K)
    x.weight_zero_point  asymmetric only: int32 [ceil(N * bits / 32), G], packed along N;
                         int8 [1] per tensor
    x.weight_g_idx       act-order "group" only: int32 [K]
"int-quantized", integers with integer activations:
    x.weight             int8 [N, K]
    x.weight_scale, x.weight_zero_point (int8, asymmetric only)
"float-quantized", 8-bit floats:
    x.weight             float8_e4m3fn [N, K]
    x.weight_scale       [1]; [N, 1]; in blocks [ceil(N / b), ceil(K / b)]; a factor
"nvfp4-pack-quantized", 4-bit floats:
    x.weight_packed        uint8 [N, K / 2]   see compress.quant.fp4
    x.weight_scale         float8_e4m3fn [N, K / 16]
    x.weight_global_scale  fp32 [1]; the scales are divided by it
All of them with static activations: x.input_scale [1].

Other tensors of the module (bias) are not touched. A Conv1D weight is stored in this [N, K] order
as well; its module is then named in the config (see quantization_config).

Version notes: widths 3, 5, 6 and 7 need compressed-tensors 0.18 (older ones unpack them wrongly);
0.19 and later refuse g_idx.
"""

import torch
from torch import Tensor

from compress.checkpoint.shards.layout import Entry
from compress.errors import RecipeError
from compress.formats.names import module_of
from compress.formats.storage import WeightStorage
from compress.quant.fp4 import pack_fp4
from compress.quant.packing import pack, words_for
from compress.quant.scheme import FP4_GROUP, ActivationScheme, QuantScheme
from compress.quant.tensor import QuantizedTensor

NAME = "compressed-tensors"
PACKED, INTEGER, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
NVFP4 = "nvfp4-pack-quantized"
# What a quantized module's tensors are called below its path, those of other tools included.
PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
)


def storage(scheme: QuantScheme) -> str:
    """The format, in compressed-tensors' words, that holds weights of a scheme."""
    if scheme.type == "float":
        return NVFP4 if scheme.is_fp4 else FLOAT
    act = scheme.activation
    return INTEGER if act is not None and act.type == "int" else PACKED


def is_packed(scheme: QuantScheme) -> bool:
    """Whether integer codes go into 32-bit words (no integer activations go with them)."""
    return storage(scheme) == PACKED


def is_static(activation: ActivationScheme | None) -> bool:
    """Whether inputs have a scale from calibration, which is stored."""
    return activation is not None and not activation.dynamic


def layout(how: WeightStorage) -> list[Entry]:
    """Exact (name, dtype code, shape) of every tensor that `encode` will return.

    Scales have the source's dtype (NVFP4's own are E4M3 and fp32), and the order is [N, K] whatever
    the source has. RecipeError for a scheme that has no place here.
    """
    module, kind = module_of(how.name), storage(how.scheme)
    _refuse(how)
    if kind == NVFP4:
        entries = _nvfp4_layout(module, how.shape)
    else:
        entries = (_packed_layout if kind == PACKED else _plain_layout)(module, how)
    if how.act_order:
        entries.append((f"{module}.weight_g_idx", "I32", (how.shape[1],)))
    if is_static(how.scheme.activation):
        entries.append((f"{module}.input_scale", how.dtype, (1,)))
    return entries


def scales_shape(scheme: QuantScheme, shape: tuple[int, int]) -> tuple[int, ...]:
    """Of the stored scales: as in memory, but [1] where there is one."""
    return (1,) if scheme.granularity == "tensor" else scheme.scale_shape(*shape)


def _packed_layout(module: str, how: WeightStorage) -> list[Entry]:
    (n, k), scheme, scales = how.shape, how.scheme, scales_shape(how.scheme, how.shape)
    entries: list[Entry] = [
        (f"{module}.weight_packed", "I32", (n, words_for(k, scheme.bits))),
        (f"{module}.weight_scale", how.dtype, scales),
        (f"{module}.weight_shape", "I64", (2,)),
    ]
    if not scheme.symmetric and scheme.granularity == "tensor":
        entries.append((f"{module}.weight_zero_point", "I8", scales))
    elif not scheme.symmetric:
        packed = (words_for(n, scheme.bits), scheme.groups(k))
        entries.append((f"{module}.weight_zero_point", "I32", packed))
    return entries


def _plain_layout(module: str, how: WeightStorage) -> list[Entry]:
    codes = "I8" if how.scheme.type == "int" else "F8_E4M3"
    scales = scales_shape(how.scheme, how.shape)
    entries: list[Entry] = [
        (f"{module}.weight", codes, how.shape),
        (f"{module}.weight_scale", how.dtype, scales),
    ]
    if not how.scheme.symmetric:
        entries.append((f"{module}.weight_zero_point", "I8", scales))
    return entries


def _nvfp4_layout(module: str, shape: tuple[int, int]) -> list[Entry]:
    n, k = shape
    return [
        (f"{module}.weight_packed", "U8", (n, k // 2)),
        (f"{module}.weight_scale", "F8_E4M3", (n, k // FP4_GROUP)),
        (f"{module}.weight_global_scale", "F32", (1,)),
    ]


def encode(how: WeightStorage, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Tensors to write, keyed and ordered as `layout` says."""
    name, module, kind = how.name, module_of(how.name), storage(how.scheme)
    how.expect(tensor)
    _refuse(how)
    if kind == NVFP4:
        parts = _nvfp4_parts(module, tensor)
    else:
        parts = (_packed_parts if kind == PACKED else _plain_parts)(module, tensor)
    if tensor.g_idx is not None:
        parts[f"{module}.weight_g_idx"] = tensor.g_idx.to(torch.int32)
    if is_static(how.scheme.activation):
        assert tensor.input_scale is not None, f"{name}: a static scheme without its input scale"
        parts[f"{module}.input_scale"] = tensor.input_scale.reshape(1)
    return parts


def _packed_parts(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    bits, scales = tensor.scheme.bits, scales_shape(tensor.scheme, tensor.shape)
    parts = {
        f"{module}.weight_packed": pack(tensor.codes, bits),
        f"{module}.weight_scale": tensor.scale.reshape(scales).contiguous(),
        f"{module}.weight_shape": torch.tensor(tensor.shape, dtype=torch.int64),
    }
    if tensor.zero is not None:
        if tensor.scheme.granularity == "tensor":
            zero = tensor.zero.reshape(scales)
        else:
            zero = pack(tensor.zero.t(), bits).t()  # [G, N] -> words [ceil(N * b / 32), G]
        parts[f"{module}.weight_zero_point"] = zero.contiguous()
    return parts


def _plain_parts(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    scales = scales_shape(tensor.scheme, tensor.shape)
    parts = {
        f"{module}.weight": tensor.codes,
        f"{module}.weight_scale": tensor.scale.reshape(scales).contiguous(),
    }
    if tensor.zero is not None:
        parts[f"{module}.weight_zero_point"] = tensor.zero.reshape(scales).contiguous()
    return parts


def _nvfp4_parts(module: str, tensor: QuantizedTensor) -> dict[str, Tensor]:
    divisor = tensor.global_scale
    if divisor is None:
        assert tensor.global_factor is not None, f"{module}: NVFP4 without its global scale"
        divisor = tensor.global_factor.reciprocal()
    return {
        f"{module}.weight_packed": pack_fp4(tensor.codes),
        f"{module}.weight_scale": tensor.scale.contiguous(),
        f"{module}.weight_global_scale": divisor.reshape(1),
    }


def why_not(
    scheme: QuantScheme, shape: tuple[int, int] | None = None, *, g_idx: bool = False
) -> str | None:
    """Why the format cannot hold a weight (N, K), and what can; None when it can.

    g_idx: act-order "group".
    """
    if scheme.activation is not None and scheme.activation.outliers != "none":
        return (
            f"{NAME} has no place for the outlier columns of LLM.int8() ({scheme.describe()}); use"
            " output.format 'bitsandbytes', or scheme W8A8"
        )
    if scheme.is_fp4 and shape is not None and shape[1] % FP4_GROUP:
        return (
            f"NVFP4 has groups of {FP4_GROUP} columns, and {shape[1]} leave a rest; ignore the"
            " layer or give it scheme FP8_DYNAMIC"
        )
    if g_idx and (scheme.granularity != "group" or not is_packed(scheme)):
        return (
            "act_order 'group' needs a weight-only scheme with groups, this one is"
            f" {scheme.describe()}; use act_order 'static' or 'none'"
        )
    return None


def _refuse(how: WeightStorage) -> None:
    if (found := why_not(how.scheme, how.shape, g_idx=how.act_order)) is not None:
        raise RecipeError(f"{how.name}: {found}")
