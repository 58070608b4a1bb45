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

SHOWN = 8  # layers that a message names
# NVFP4's scales are E4M3 in every format; powers of two are exact in any other dtype.
_SMALL_FLOATS = (torch.float8_e4m3fn, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class ExportLayer:
    """A quantized linear: how it is stored, and its bytes on disk in either format.

    order: hash of its g_idx, None where every column is in the group of its place. zeros: how many
    zero points it has. unstorable: how many of them the target has no place for.
    """

    linear: LinearSpec
    scheme: QuantScheme
    order: str | None
    zeros: int
    unstorable: int
    bytes_before: int
    bytes_after: int

    @property
    def reordered(self) -> bool:
        """Whether its columns have an order of their own (act-order "group")."""
        return self.order is not None


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


def refuse_zeros(layers: Mapping[str, ExportLayer], target: Format) -> None:
    """RecipeError for zero points that the target has no place for, with the layers that have
    some."""
    found = [x for x in layers.values() if x.unstorable]
    if not found:
        return
    shown = [f"{x.linear.name} ({x.unstorable} of {x.zeros})" for x in found]
    more = f" and {len(shown) - SHOWN} more layers" if len(shown) > SHOWN else ""
    raise RecipeError(
        f"{target.name} has no place for zero points of 0 (version 1 stores -1, which loaders read"
        f" differently), and there are some in {', '.join(shown[:SHOWN])}{more}; export to gptq_v2"
    )


def refuse_unlike(source: CodedWeights, target: Format, layers: Mapping[str, ExportLayer]) -> None:
    """RecipeError for linears that runtimes merge into one matrix (q/k/v; gate/up) and that the
    source stores in different ways, with different global scales or orders of columns."""
    if target.method is None:
        return
    for block in source.spec.blocks:
        members: dict[str, list[LinearSpec]] = {}
        for linear in block.linears:
            if linear.fused is not None:
                members.setdefault(linear.fused, []).append(linear)
        for found in members.values():
            _refuse_ways({x.name: _stored(source, x, layers.get(x.tensor)) for x in found})
            _refuse_orders(source, {x.name: layers[x.tensor] for x in found if x.tensor in layers})


def _refuse_ways(ways: Mapping[str, str]) -> None:
    if len(set(ways.values())) > 1:
        shown = ", ".join(f"{name} {stored}" for name, stored in ways.items())
        raise RecipeError(
            f"{shown}; runtimes merge these into one matrix, so they need one scheme; export to"
            " dense"
        )


def _refuse_orders(source: CodedWeights, merged: Mapping[str, ExportLayer]) -> None:
    first, *others = merged or [""]
    other = next((name for name in others if merged[name].order != merged[first].order), None)
    if other is not None:
        part = source.reader.g_idx
        raise RecipeError(
            f"{first}.{part} and {other}.{part} give columns different orders, and runtimes merge"
            f" {', '.join(merged)} into one matrix with one order: one of them is damaged, or only"
            " dense can hold them; export to dense"
        )


def _stored(source: CodedWeights, linear: LinearSpec, layer: ExportLayer | None) -> str:
    if layer is None:
        return "unquantized"
    words = layer.scheme.describe()
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
