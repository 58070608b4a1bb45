"""cast: stores every floating-point tensor in one dtype, and names that dtype in config.json.

Widening is exact. Narrowing rounds to nearest, ties to even, as torch does; the report shows what
it costs. Two losses are refused, with the tensor's name. One is a value that would become infinite:
fp16 ends at 65,504, while bf16 has the range of fp32 but for its last 0.4 %. The other is a row
with values other than 0 that would become all 0, which would silence an output or a token: fp16 has
nothing between 0 and 6e-8. Tensors of whole numbers stay as they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.dtype_codes import itemsize
from compress.checkpoint.shards.dtypes import DTYPE_CODES, TORCH_DTYPES
from compress.checkpoint.shards.layout import Entry
from compress.edits.edit import Edited, Part, Rows
from compress.errors import CheckpointError, RecipeError
from compress.report.units import counted

FLOATS = ("F64", "F32", "F16", "BF16")
NAMES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
)
DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5 writes the first, versions before the second
# What to do where a dtype does not hold the values.
WIDER: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float16: "cast to bf16 or fp32",
        torch.bfloat16: "cast to fp32",
        torch.float32: "take the stage out",
    }
)
# Bytes that `_refuse_lost` adds to each number that is read and cast: two masks of bool.
MASKS = 2


@dataclass(frozen=True, slots=True)
class CastConfig:
    """dtype: what all floating-point tensors get."""

    dtype: Literal["bf16", "fp16", "fp32"]

    def __post_init__(self) -> None:
        if self.dtype not in NAMES:
            raise RecipeError(f"dtype is {self.dtype!r}; it is one of {', '.join(NAMES)}")


def plan(source: Outline, config: CastConfig) -> Edited:
    """The same tensors and shapes in the new dtype."""
    if config.dtype == "fp16" and any(x.sizes.latent for x in source.spec.blocks):
        raise CheckpointError(
            "fp16 has no numbers as small as those that make a latent; cast to bf16 or fp32"
        )
    code, tensors = DTYPE_CODES[NAMES[config.dtype]], source.tensors.values()
    entries: list[Entry] = [
        (info.name, code if info.dtype in FLOATS else info.dtype, info.shape) for info in tensors
    ]
    kept = [info for info in tensors if info.dtype not in FLOATS]
    notes = [f"{info.name} stays {info.dtype}, as it holds no floats" for info in kept]
    if all(info.dtype == dtype for info, (_, dtype, _) in zip(tensors, entries, strict=True)):
        notes.append(f"cast to {config.dtype} changes nothing: every tensor is stored so already")
    return Edited(_with_dtype(source.config, NAMES[config.dtype]), tuple(entries), tuple(notes))


def apply(part: Part, config: CastConfig) -> Iterator[Rows]:
    """Cast every tensor by itself, a run of rows at a time."""
    for name in part.names:
        target = TORCH_DTYPES[part.source.tensors[name].dtype]
        if part.source.tensors[name].dtype in FLOATS:
            target = NAMES[config.dtype]
        for start, rows in part.in_rows(name):
            cast = rows.to(target)
            _refuse_lost(name, start, _in_two(rows, part), _in_two(cast, part))
            yield Rows(name, start, cast)


def held(source: Outline, config: CastConfig, run: int) -> int:
    """Bytes of one run of rows: as it is read, as it is cast, and its masks."""
    read = max(itemsize(info.dtype) for info in source.tensors.values())
    return run * (read + NAMES[config.dtype].itemsize + MASKS)


def _refuse_lost(name: str, start: int, before: Tensor, after: Tensor) -> None:
    """CheckpointError for values that the new dtype cannot hold.

    before, after: [..., columns], the rows of one run, as it is read and as it is cast. start: of
    the run.
    """
    if before.dtype == after.dtype or not before.numel():
        return
    dtype = str(after.dtype).removeprefix("torch.")
    lost = after.isinf()
    if bool(lost.any()):
        most = torch.finfo(after.dtype).max
        values = counted(int(lost.sum()), "value")
        raise CheckpointError(
            f"tensor {name!r} has {values} beyond {most:g}, the largest of {dtype}"
            f" (one is {float(before[lost][0]):g}); {WIDER[after.dtype]}"
        )
    gone = before.ne(0).any(-1) & after.eq(0).all(-1)
    if bool(gone.any()):
        first, *rest = gone.nonzero()[0].tolist() or [None]
        place = ", ".join(map(str, [] if first is None else [start + first, *rest]))
        which = f"row {place} of tensor" if place else "tensor"
        raise CheckpointError(
            f"{which} {name!r} would become 0 in {dtype}: its values are below"
            f" {_zero_below(after.dtype):.2g}; {WIDER[after.dtype]}"
        )


def _in_two(rows: Tensor, part: Part) -> Tensor:
    """The same values as [..., columns]. A vector is one row: a norm or a bias may well have zeros.
    Of more than two dimensions all but the last count rows inside a block, where experts lie as one
    tensor [experts, rows, columns]; outside, where convolutions do, the first."""
    deep = rows.dim() > 2 and part.block is None
    return rows.reshape(len(rows), -1) if deep else rows


def _zero_below(dtype: torch.dtype) -> float:
    """Half of the dtype's smallest number above 0: magnitudes below it become 0."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2


def _with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json with the dtype at the top, and wherever else it named one."""
    word = str(dtype).removeprefix("torch.")
    keys = [key for key in DTYPE_KEYS if key in config] or [DTYPE_KEYS[1]]
    return {key: _nested(value, word) for key, value in config.items()} | dict.fromkeys(keys, word)


def _nested(value: Any, word: str) -> Any:
    """A value of config.json; where it is itself a config (of a text decoder or a vision tower), it
    names the dtype wherever it named one."""
    if not isinstance(value, dict):
        return value
    return {k: word if k in DTYPE_KEYS else _nested(v, word) for k, v in value.items()}
