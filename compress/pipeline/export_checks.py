"""What stands against an export: layers, scales and caches that a format cannot hold."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from compress.arch.spec import LinearSpec
from compress.checkpoint.dtypes import DTYPE_CODES, TORCH_DTYPES
from compress.errors import CheckpointError, RecipeError
from compress.formats import FORMATS, CodedWeights, Format
from compress.formats.scales import Change, change, damage, refusal
from compress.formats.validate import GLOBAL_SCALES
from compress.quant.scheme import ActivationScheme, QuantScheme

# NVFP4's scales are E4M3 in every format; powers of two are exact in any other dtype.
_SMALL_FLOATS = (torch.float8_e4m3fn, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class ExportLayer:
    """A quantized linear: how it is stored, whether its columns have an order of their own
    (act-order "group"), and its bytes on disk in either format."""

    linear: LinearSpec
    scheme: QuantScheme
    reordered: bool
    bytes_before: int
    bytes_after: int


def refuse_factor(source: CodedWeights, target: Format, linear: LinearSpec) -> None:
    """Factors of a linear's inputs that nothing has folded away: none but dense weights hold
    them."""
    name = f"{linear.name}.pre_quant_scale"
    if target.method is None or name not in source.checkpoint.tensors:
        return
    if bool((source.checkpoint.read(name) != 1).any()):
        raise RecipeError(
            f"{linear.name}: its inputs are multiplied by {name}, which {target.name} has no place"
            " for; formats that hold all layers: dense"
        )


def refuse_unfit(layers: Mapping[str, ExportLayer], target: Format) -> None:
    """RecipeError for the first layer that the target cannot hold, with what can hold all."""
    found = {x.linear.name: why for x in layers.values() if (why := _against(x, target))}
    if not found:
        return
    name, reason = next(iter(found.items()))
    more = f" (nor {len(found) - 1} more layers)" if len(found) > 1 else ""
    others = [
        fmt.name for fmt in FORMATS.values() if not any(_against(x, fmt) for x in layers.values())
    ]
    raise RecipeError(
        f"{name} does not fit into {target.name}{more}: {reason}; formats that hold all layers:"
        f" {', '.join(others)}"
    )


def refuse_unlike(source: CodedWeights, target: Format, layers: Mapping[str, ExportLayer]) -> None:
    """RecipeError for linears that runtimes merge into one matrix (q/k/v; gate/up) and that the
    source stores in different ways, or with different global scales."""
    if target.method is None:
        return
    for block in source.spec.blocks:
        members: dict[str, dict[str, str]] = {}
        for linear in block.linears:
            if linear.fused is not None:
                stored = _stored(source, linear, layers.get(linear.tensor))
                members.setdefault(linear.fused, {})[linear.name] = stored
        for found in members.values():
            if len(set(found.values())) > 1:
                shown = ", ".join(f"{name} {stored}" for name, stored in found.items())
                raise RecipeError(
                    f"{shown}; runtimes merge these into one matrix, so they need one scheme;"
                    " export to dense"
                )


def _stored(source: CodedWeights, linear: LinearSpec, layer: ExportLayer | None) -> str:
    if layer is None:
        return "unquantized"
    words = layer.scheme.describe() + (" with g_idx" if layer.reordered else "")
    for part in source.reader.scales if layer.scheme.is_fp4 else ():
        name = f"{linear.name}.{part}"
        if part in GLOBAL_SCALES and name in source.checkpoint.tensors:
            words += f" with a global scale of {source.checkpoint.read(name).flatten().tolist()}"
    return words


def _against(layer: ExportLayer, target: Format) -> str | None:
    return target.against(layer.scheme, layer.linear.shape, g_idx=layer.reordered)


def check_scales(
    source: CodedWeights, target: Format, layers: Mapping[str, ExportLayer], *, round_scales: bool
) -> Change:
    """Read all scales: CheckpointError for damaged ones, RecipeError for those that the target
    would change."""
    found = Change()
    dtype = TORCH_DTYPES[target.scale_dtype] if target.scale_dtype is not None else None
    for layer in layers.values():
        for part in source.reader.scales:
            name = f"{layer.linear.name}.{part}"
            if name not in source.checkpoint.tensors:
                continue
            scale = source.checkpoint.read(name)
            _refuse_damaged(name, scale, layer.scheme if part == source.reader.scales[0] else None)
            if dtype is not None and scale.dtype not in _SMALL_FLOATS and _is_main(part):
                found = found.plus(change(scale, dtype))
    if dtype is not None:
        reason = refusal(found, dtype, round_scales=round_scales)
        if reason is not None:
            raise RecipeError(f"{target.name}: {reason}")
    return found


def _is_main(part: str) -> bool:
    """Scales of weights and inputs follow the target's dtype, NVFP4's global scale is fp32."""
    return part not in GLOBAL_SCALES


def _refuse_damaged(name: str, scale: torch.Tensor, scheme: QuantScheme | None) -> None:
    bad, how = damage(scale, scheme)
    if bad:
        raise CheckpointError(
            f"tensor {name} has {bad} scales that are {how}; repair the checkpoint or download it"
            " again"
        )


def cache_of(source: CodedWeights, target: Format) -> tuple[ActivationScheme | None, str]:
    """Scheme of the key/value cache and the dtype code of its scales."""
    if source.kv_cache is None:
        return None, "BF16"
    if target.cache is None:
        holders = ", ".join(fmt.name for fmt in FORMATS.values() if fmt.cache is not None)
        raise RecipeError(
            f"{source.checkpoint.path} has scales of a key/value cache"
            f" ({source.kv_cache.describe()}), which {target.name} has no place for; formats that"
            f" hold them: {holders}"
        )
    scales = [source.cache(block) for block in source.spec.blocks]
    if any(found is None for found in scales):
        raise CheckpointError(
            f"{source.checkpoint.path}: quantization_config has a kv_cache_scheme, but not every"
            " block has scales of its cache; the checkpoint is incomplete"
        )
    k = scales[0][0].scale if scales and scales[0] is not None else None
    return source.kv_cache, "BF16" if k is None else DTYPE_CODES[k.dtype]
