"""Block FP8 (DeepSeek's, `quant_method` "fp8"), both ways: read by vLLM, SGLang, transformers.

`x.weight` [N, K] becomes:
    x.weight            float8_e4m3fn [N, K]
    x.weight_scale_inv  fp32 [ceil(N / b), ceil(K / b)]   a factor, whatever its name says
Blocks at the right and lower edge may be smaller. Inputs are rounded to E4M3 at run time, with a
scale for every b neighbouring columns of a token.

Without `weight_block_size` in the config one scale is for the whole weight:
    x.weight_scale      fp32 []
    x.input_scale       fp32 [], when `activation_scheme` is "static"
which is how vLLM calls them. transformers says weight_scale_inv and activation_scale; both are
read. Dynamic inputs have a scale a token here (as in vLLM with CUTLASS, and in transformers).

Scales of other tools may be bf16 (Qwen) or powers of two in E8M0 (DeepSeek V3.1, `scale_fmt`
"ue8m0"), which fp32 holds exactly.
"""

import torch
from torch import Tensor

from compress.checkpoint.shards.layout import Entry
from compress.errors import RecipeError
from compress.formats.fp8.config import NAME, quantization_config, read_schemes
from compress.formats.names import module_of
from compress.formats.storage import WeightStorage
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
    missing,
    positive,
)
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import InputQuantization, QuantizedTensor

# What a quantized module's tensors are called below its path, beside "weight".
PARTS = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
# Those that are there for every quantized module, and those of static inputs: one of each.
SCALES, INPUTS = PARTS[:2], PARTS[2:]

__all__ = [
    "INPUTS",
    "NAME",
    "PARTS",
    "SCALES",
    "beside",
    "decode",
    "encode",
    "gather",
    "inputs",
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

    shape: any. g_idx: act-order "group", which no float scheme has.
    """
    if scheme.type != "float" or scheme.bits != 8 or g_idx:
        return (
            f"it holds 8-bit floats only, not {scheme.describe()}; use compressed-tensors, or"
            " quantize with scheme FP8_BLOCK"
        )
    if scheme.granularity not in ("block", "tensor"):
        return (
            f"it has one scale a block or a tensor, not {scheme.describe()}; use"
            " compressed-tensors, or quantize with scheme FP8_BLOCK"
        )
    act = scheme.activation
    if act is None or act.type != "float":
        return (
            f"its inputs are FP8 as well, unlike {scheme.describe()}; use compressed-tensors, or"
            " quantize with scheme FP8_BLOCK"
        )
    if scheme.granularity == "block" and (act.granularity, act.group_size) != (
        "group",
        scheme.group_size,
    ):
        return (
            f"beside blocks of {scheme.group_size} its inputs have dynamic groups of"
            f" {scheme.group_size}, unlike {scheme.describe()}; use compressed-tensors, or quantize"
            " with scheme FP8_BLOCK"
        )
    if scheme.granularity == "tensor" and act.dynamic and act.granularity != "token":
        return (
            f"its dynamic inputs have a scale a token, unlike {scheme.describe()}; use"
            " compressed-tensors, or quantize with scheme FP8"
        )
    return None


def layout(how: WeightStorage) -> list[Entry]:
    """Exact (name, dtype code, shape) of every tensor that `encode` will return.

    Scales are fp32 and the order is [N, K], whatever the source has. RecipeError for a scheme that
    has no place here.
    """
    module, scheme = module_of(how.name), how.scheme
    _refuse(how)
    entries: list[Entry] = [(how.name, "F8_E4M3", how.shape)]
    if scheme.granularity == "block":
        return [*entries, (f"{module}.weight_scale_inv", "F32", scheme.scale_shape(*how.shape))]
    entries.append((f"{module}.weight_scale", "F32", ()))
    if _static(scheme):
        entries.append((f"{module}.input_scale", "F32", ()))
    return entries


def encode(how: WeightStorage, tensor: QuantizedTensor) -> dict[str, Tensor]:
    """Tensors to write, keyed and ordered as `layout` says."""
    name, module, scheme = how.name, module_of(how.name), how.scheme
    how.expect(tensor)
    _refuse(how)
    scale = tensor.scale.float()
    if scheme.granularity == "block":
        return {name: tensor.codes, f"{module}.weight_scale_inv": scale.contiguous()}
    parts = {name: tensor.codes, f"{module}.weight_scale": scale.reshape(())}
    if _static(scheme):
        assert tensor.input_scale is not None, f"{name}: a static scheme without its input scale"
        parts[f"{module}.input_scale"] = tensor.input_scale.float().reshape(())
    return parts


def decode(name: str, scheme: QuantScheme, has: Has, read: Read) -> QuantizedTensor:
    """The weight called `name`, from the tensors `encode` or another tool wrote for it.

    has, read: the checkpoint's names and its reader. CheckpointError when a part is missing or not
    what it must be.
    """
    stored = Stored(module_of(name), scheme, has, read)
    parts = gather(stored)
    part = _either(stored, SCALES)
    scale = parts[part]
    if scheme.granularity == "block":
        scale = scale.float() if scale.dtype == torch.float8_e8m0fnu else scale
    else:
        scale = positive(stored.at(part), scale).reshape(1, 1)
    return beside(stored, parts).around(parts["weight"], scale, scheme)


def gather(stored: Stored) -> Parts:
    """All tensors of a module, each of the dtype and shape that its scheme needs.

    CheckpointError for what does not fit; values are not looked at.
    """
    scheme, codes = stored.scheme, stored.get("weight", E4M3)
    n, k = codes.shape
    if scheme.granularity == "block":
        part, kinds = SCALES[0], (*HALVES, torch.float8_e8m0fnu)
        scale = stored.get(part, kinds, scheme.scale_shape(n, k))
    else:
        scale = stored.number(part := _either(stored, SCALES))
    parts = {"weight": codes, part: scale}
    if _static(scheme):
        part = _either(stored, INPUTS)
        parts[part] = stored.number(part)
    return parts


def beside(stored: Stored, parts: Parts) -> Beside:
    """What the weight has beside codes and scales. CheckpointError for values that cannot be."""
    found = inputs(stored.module, stored.scheme, stored.has, stored.read)
    return Beside(input_scale=None if found is None else found.scale)


def inputs(module: str, scheme: QuantScheme, has: Has, read: Read) -> InputQuantization | None:
    """How a module's inputs are rounded, with their scale [1] where that is static."""
    if scheme.activation is None or scheme.activation.dynamic:
        return None if scheme.activation is None else InputQuantization(scheme.activation)
    stored = Stored(module, scheme, has, read)
    part = _either(stored, INPUTS)
    return InputQuantization(scheme.activation, positive(stored.at(part), stored.number(part)))


def weight_shape(module: str, scheme: QuantScheme, shape_of: ShapeOf) -> tuple[int, int]:
    """(N, K) of a quantized weight; CheckpointError when it is missing or no matrix."""
    return matrix_shape(module, scheme, "weight", shape_of)


def _static(scheme: QuantScheme) -> bool:
    return scheme.activation is not None and not scheme.activation.dynamic


def _either(stored: Stored, parts: tuple[str, ...]) -> str:
    """The first of several names for one thing that the module has."""
    for part in parts:
        if stored.has(f"{stored.module}.{part}"):
            return part
    raise missing(stored.module, stored.scheme, f"{stored.module}.{' or '.join(parts)}")


def _refuse(how: WeightStorage) -> None:
    if (found := why_not(how.scheme, g_idx=how.act_order)) is not None:
        raise RecipeError(f"{how.name}: format {NAME!r}: {found}")
