"""Scales of the key/value cache in a compressed-tensors checkpoint.

A cache of 8-bit floats or integers with one calibrated scale for the keys and one for the values
of every attention: `<attention>.k_scale` and `<attention>.v_scale` [1], and `kv_cache_scheme` in
the quantization_config. An ActivationScheme says it all: static, one scale for the tensor.
"""

from collections.abc import Collection, Container
from typing import Any

from torch import Tensor

from compress.arch.spec import BlockSpec, DecoderSpec
from compress.checkpoint.shards.layout import Entry
from compress.errors import CheckpointError, RecipeError
from compress.quant.scheme import ActivationScheme

FP8_CACHE = ActivationScheme(type="float", granularity="tensor", dynamic=False)
INT8_CACHE = ActivationScheme(type="int", granularity="tensor", dynamic=False)

# What tools call tensors of the cache; the last two are old compressed-tensors'.
_ENDINGS = (
    *(f".{x}_{part}" for x in "kvq" for part in ("scale", "zero_point")),
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)


def attention_of(block: BlockSpec) -> str:
    """Path of a block's attention module, above its key projection.

    RecipeError for a block in which none is known.
    """
    for linear in block.linears:
        if linear.role in ("k", "qkv"):
            return linear.name.rpartition(".")[0]
    raise RecipeError(
        f"{block.prefix}: no key projection is known in it, so its cache has no place for scales;"
        " leave the key/value cache as it is"
    )


def kv_names(block: BlockSpec) -> tuple[str, str]:
    """Tensor names of the key and the value scale of a block."""
    attention = attention_of(block)
    return f"{attention}.k_scale", f"{attention}.v_scale"


def kv_layout(spec: DecoderSpec, scale_dtype: str) -> list[Entry]:
    """Exact (name, dtype code, shape) of the scales of all blocks, in order.

    scale_dtype: safetensors code, of the source's weights as for other scales.
    """
    return [(name, scale_dtype, (1,)) for block in spec.blocks for name in kv_names(block)]


def kv_encode(block: BlockSpec, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The tensors to write for one block. k, v: scales of one element, in the stored dtype."""
    k_name, v_name = kv_names(block)
    return {k_name: k.reshape(1), v_name: v.reshape(1)}


def kv_to_config(cache: ActivationScheme) -> dict[str, Any]:
    """The `kv_cache_scheme` of a quantization_config; RecipeError for what it cannot say."""
    if cache.bits != 8 or cache.dynamic or cache.outliers != "none":
        raise RecipeError(
            f"kv_cache: {cache.describe()} cannot be stored; 8 bits with one static scale a tensor"
            " can (fp8 or int8)"
        )
    return {
        "num_bits": cache.bits,
        "type": cache.type,
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }


def is_cache_tensor(name: str) -> bool:
    """Whether a tensor of a quantized checkpoint is a scale or zero point of the cache."""
    return name.endswith(_ENDINGS)


def scales_in(block: BlockSpec, names: Container[str]) -> tuple[str, str] | None:
    """Names of a block's two scales where a checkpoint has them."""
    try:
        attention = attention_of(block)
    except RecipeError:
        return None
    places = (
        (f"{attention}.k_scale", f"{attention}.v_scale"),
        (f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"),
        (f"{attention}.k_proj.output_scale", f"{attention}.v_proj.output_scale"),
    )
    return next(((k, v) for k, v in places if k in names and v in names), None)


def refuse_lost(block: BlockSpec, names: Collection[str]) -> None:
    """CheckpointError for a block that lacks a scale of its cache where others are stored. Without
    any, only the config speaks of a cache, and it is as it is."""
    attends = any(linear.role in ("k", "qkv") for linear in block.linears)
    if attends and any(is_cache_tensor(name) for name in names):
        k, v = kv_names(block)
        lost = v if k in names else k
        raise CheckpointError(
            f"quantization_config has scales of a key/value cache, but tensor {lost} is missing;"
            " the checkpoint is incomplete, so download it again"
        )
