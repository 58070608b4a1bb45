"""Scales on their way into another format: which are damaged, and what its dtype does to them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compress.checkpoint.shards.dtypes import DTYPE_CODES, TORCH_DTYPES
from compress.convert.source import ExportLayer, Held
from compress.errors import CheckpointError
from compress.formats import Format
from compress.formats.scales import ScaleRounding, change, damage, why_not_exact
from compress.formats.validate import GLOBAL_SCALES

# NVFP4's scales are E4M3 in every format; powers of two are exact in any other dtype.
_SMALL_FLOATS = (torch.float8_e4m3fn, torch.float8_e8m0fnu)
DTYPE_WORDS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E8M0": "E8M0"}


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """What becomes of the scales of weights and inputs.

    kinds: (dtype code before, after), without those that no format changes. change: what that does
    to their values.
    """

    kinds: tuple[tuple[str, str], ...] = field(default=())
    change: ScaleRounding = field(default=ScaleRounding())

    def describe(self) -> str | None:
        """A line for a person; None where no scale gets another dtype."""
        shown = [f"{DTYPE_WORDS[a]} to {DTYPE_WORDS[b]}" for a, b in self.kinds if a != b]
        if not shown:
            return None
        words = f"scales go from {' and '.join(shown)}"
        if not self.change.changed:
            return f"{words}, all of them exactly"
        return (
            f"{words}: {self.change.changed} of {self.change.total} are rounded, the largest change"
            f" is {self.change.largest:.2g} of the scale"
        )


def scale_change(held: Held, target: Format) -> ScaleChange:
    """Reads all scales; CheckpointError for damaged ones."""
    kinds: dict[tuple[str, str], None] = {}
    total = ScaleRounding()
    for layer in held.layers.values():
        for part, scale in _scales(held, layer):
            # NVFP4's global scale is fp32 everywhere.
            if part in GLOBAL_SCALES or scale.dtype == torch.float8_e4m3fn:
                continue
            before = DTYPE_CODES[scale.dtype]
            after = target.scale_dtype or ("F32" if before == "F8_E8M0" else before)
            kinds[before, after] = None
            if scale.dtype not in _SMALL_FLOATS:
                total = total.plus(change(scale, TORCH_DTYPES[after]))
    return ScaleChange(() if target.method is None else tuple(kinds), total)


def why_not_scales(found: ScaleChange, target: Format, *, round_scales: bool) -> str | None:
    """Why a format cannot hold the scales, without a remedy; None when it can."""
    if target.scale_dtype is None:
        return None
    dtype = TORCH_DTYPES[target.scale_dtype]
    reason = why_not_exact(found.change, dtype, round_scales=round_scales)
    return None if reason is None else f"{target.name}: {reason.partition('; ')[0]}"


def _scales(held: Held, layer: ExportLayer) -> Iterator[tuple[str, Tensor]]:
    """Stored scales of a layer by part, none of them damaged."""
    checkpoint, parts = held.weights.checkpoint, held.weights.reader.scales
    for part in parts:
        name = f"{layer.linear.name}.{part}"
        if name in checkpoint.tensors:
            scale = checkpoint.read(name)
            _refuse_damaged(name, scale, layer, main=part == parts[0])
            yield part, scale


def _refuse_damaged(name: str, scale: Tensor, layer: ExportLayer, *, main: bool) -> None:
    bad, how = damage(scale, layer.scheme if main else None)
    if bad:
        raise CheckpointError(
            f"tensor {name} has {bad} {'scale that is' if bad == 1 else 'scales that are'} {how};"
            " repair the checkpoint or download it again"
        )
