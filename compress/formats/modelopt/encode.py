"""ModelOpt's layout of one weight (read by TensorRT-LLM, vLLM and SGLang), written.

`x.weight` [N, K] becomes, by the algorithm (see compress.formats.modelopt.config):

FP8                        weight float8_e4m3fn [N, K], weight_scale fp32 [], input_scale fp32 []
FP8_PER_CHANNEL_PER_TOKEN  weight float8_e4m3fn [N, K], weight_scale fp32 [N]
FP8_PB_WO                  weight float8_e4m3fn [N, K], weight_scale fp32 [N / 128, 1, K / 128, 1]
W4A16_NVFP4, NVFP4         weight uint8 [N, K / 2] (compress.quant.fp4), weight_scale
                           float8_e4m3fn [N, K / 16], weight_scale_2 fp32 []: the scales are
                           multiplied by it; NVFP4 has an input_scale too, of FP4 inputs
W4A16_AWQ                  weight uint8 [N / 2, K]: row 2i is the low nibble of a byte, row 2i + 1
                           the high one, two's complement; weight_scale fp32 [N, K / g]
W8A16                      weight int8 [N, K], weight_scale fp32 [N]
W8A8_SQ_PER_CHANNEL        weight int8 [N, K], weight_scale fp32 [N], input_scale fp32 []

ModelOpt's own may have a pre_quant_scale [K], see modelopt_read. None is ever written: what we
compress has such factors folded into the layer before, and a tensor that has one is refused.

The global scale of our own NVFP4 weights is a divisor; its reciprocal, rounded to fp32, is
written.
"""

import torch
from torch import Tensor

from compress.arch.spec import BlockSpec, DecoderSpec
from compress.checkpoint.shards.layout import Entry
from compress.errors import RecipeError
from compress.formats.kv_cache import attention_of
from compress.formats.modelopt.config import (
    NAME,
    algorithm,
    quantization_config,
    read_schemes,
    side_file,
)
from compress.formats.names import module_of
from compress.formats.storage import WeightStorage
from compress.quant.fp4 import pack_fp4
from compress.quant.scheme import FP4_GROUP, QuantScheme
from compress.quant.tensor import QuantizedTensor

# What a quantized module's tensors are called below its path, beside "weight".
PARTS = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
SCALES = PARTS[:1]

__all__ = [
    "NAME",
    "PARTS",
    "SCALES",
    "encode",
    "is_int4",
    "is_static",
    "kv_encode",
    "kv_layout",
    "layout",
    "pack_rows",
    "quantization_config",
    "read_schemes",
    "side_file",
    "stored_scale_shape",
    "why_not",
]


def why_not(
    scheme: QuantScheme, shape: tuple[int, int] | None = None, *, g_idx: bool = False
) -> str | None:
    """Why the format cannot hold a weight (N, K), and what can; None when it can."""
    if algorithm(scheme) is None:
        return f"it has no algorithm for {scheme.describe()}; {_instead(scheme)}"
    if g_idx:
        return "it has no act-order; use act_order 'static', or compressed-tensors"
    if shape is None:
        return None
    (n, k), size = shape, scheme.group_size
    if scheme.granularity == "group" and k % size:
        return (
            f"{k} columns divide by no group of {size}; use compressed-tensors, or leave the layer"
            " out"
        )
    if is_int4(scheme) and n % 2:
        return (
            f"it packs 4-bit rows by two, which does not divide {n} rows; use compressed-tensors,"
            " or leave the layer out"
        )
    return None


def _instead(scheme: QuantScheme) -> str:
    """The nearest thing that can hold it."""
    if not scheme.symmetric:
        return "it is symmetric throughout; use awq, gptq or compressed-tensors"
    if scheme.type == "float" and scheme.granularity == "block" and scheme.activation is not None:
        return "its blocks of 128 go with unquantized inputs; use format fp8"
    if scheme.type == "int" and scheme.bits == 8 and scheme.activation is not None:
        return "use compressed-tensors, or quantize with scheme W8A8_STATIC"
    return "use compressed-tensors, or quantize with scheme W4A16, W8A16, FP8 or NVFP4A16"


def layout(how: WeightStorage) -> list[Entry]:
    """Exact (name, dtype code, shape) of every tensor that `encode` will return.

    Scales are fp32 (NVFP4's E4M3) and the order is [N, K], whatever the source has. RecipeError for
    a weight that has no place here.
    """
    name, scheme, shape = how.name, how.scheme, how.shape
    module, (n, k) = module_of(name), shape
    _refuse(how)
    scales = f"{module}.weight_scale"
    if scheme.is_fp4:
        return [
            (name, "U8", (n, k // 2)),
            (scales, "F8_E4M3", (n, k // FP4_GROUP)),
            (f"{module}.weight_scale_2", "F32", ()),
        ]
    if is_int4(scheme):
        return [(name, "U8", (n // 2, k)), (scales, "F32", scheme.scale_shape(n, k))]
    entries: list[Entry] = [
        (name, "I8" if scheme.type == "int" else "F8_E4M3", shape),
        (scales, "F32", stored_scale_shape(scheme, shape)),
    ]
    if is_static(scheme):
        entries.append((f"{module}.input_scale", "F32", ()))
    return entries


def encode(how: WeightStorage, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Tensors to write, keyed and ordered as `layout` says."""
    name, module, scheme = how.name, module_of(how.name), how.scheme
    how.expect(tensor)
    _refuse(how)
    if tensor.input_factor is not None:
        raise RecipeError(
            f"{name}: format {NAME!r}: its inputs are multiplied by a pre_quant_scale, which is"
            " read but not written; use format dense"
        )
    scales = f"{module}.weight_scale"
    if scheme.is_fp4:
        factor = _global_factor(name, tensor).reshape(())
        scale = tensor.scale.contiguous()
        return {
            name: pack_fp4(tensor.codes),
            scales: scale,
            f"{module}.weight_scale_2": factor,
        }
    scale = tensor.scale.float().contiguous()
    if is_int4(scheme):
        return {name: pack_rows(tensor.codes), scales: scale}
    parts = {name: tensor.codes, scales: scale.reshape(stored_scale_shape(scheme, tensor.shape))}
    if is_static(scheme):
        assert tensor.input_scale is not None, f"{name}: a static scheme without its input scale"
        parts[f"{module}.input_scale"] = tensor.input_scale.float().reshape(())
    return parts


def kv_layout(spec: DecoderSpec, scale_dtype: str) -> list[Entry]:
    """Exact (name, dtype code, shape) of the cache's scales of all blocks: fp32 [] here."""
    return [(name, "F32", ()) for block in spec.blocks for name in _kv_names(block)]


def kv_encode(block: BlockSpec, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The cache's scales of one block. k, v: of one element."""
    scales = (k.float().reshape(()), v.float().reshape(()))
    return dict(zip(_kv_names(block), scales, strict=True))


def _kv_names(block: BlockSpec) -> tuple[str, str]:
    """Below k_proj and v_proj, also where the projections are one matrix."""
    attention = attention_of(block)
    return f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"


def pack_rows(codes: Tensor) -> Tensor:
    """uint8 [N / 2, K] of int8 codes [N, K] in -8..7; N is even."""
    nibbles = codes.view(torch.uint8) & 0x0F
    return nibbles[0::2] | (nibbles[1::2] << 4)


def stored_scale_shape(scheme: QuantScheme, shape: tuple[int, int]) -> tuple[int, ...]:
    """Of the fp32 scales of a weight that is not packed."""
    if scheme.granularity == "block":
        rows, columns = scheme.scale_shape(*shape)
        return rows, 1, columns, 1
    return () if scheme.granularity == "tensor" else (shape[0],)


def _global_factor(name: str, tensor: QuantizedTensor) -> Tensor:
    if tensor.global_factor is not None:
        return tensor.global_factor
    assert tensor.global_scale is not None, f"{name}: NVFP4 without its global scale"
    return tensor.global_scale.reciprocal()


def is_int4(scheme: QuantScheme) -> bool:
    return scheme.type == "int" and scheme.bits == 4


def is_static(scheme: QuantScheme) -> bool:
    return scheme.activation is not None and not scheme.activation.dynamic


def _refuse(how: WeightStorage) -> None:
    if (found := why_not(how.scheme, how.shape, g_idx=how.act_order)) is not None:
        raise RecipeError(f"{how.name}: format {NAME!r}: {found}")
