"""The tensors of one quantized module, read by name and checked against what its scheme needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

Has = Callable[[str], bool]
Read = Callable[[str], Tensor]
ShapeOf = Callable[[str], tuple[int, ...] | None]
Parts = Mapping[str, Tensor]  # by what they are called below the module

HALVES = (torch.float16, torch.bfloat16, torch.float32)
WORDS = (torch.int32,)
INDICES = (torch.int32, torch.int64)
E4M3 = (torch.float8_e4m3fn,)
_UNFIT = "the tensors and quantization_config do not belong together"


@dataclass(frozen=True, slots=True)
class Stored:
    """has, read: the checkpoint's names and its reader. Only dtypes and shapes are looked at, so
    `read` may give tensors without values (device meta) to learn whether they fit."""

    module: str
    scheme: QuantScheme
    has: Has
    read: Read

    def at(self, part: str) -> str:
        return f"{self.module}.{part}"

    def holds(self, part: str) -> bool:
        return self.has(self.at(part))

    def get(
        self, part: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """The tensor called `part` below the module; CheckpointError when it is missing or is
        not what it must be. shape: None for any matrix."""
        values = self._any(part)
        fits = values.dim() == 2 if shape is None else tuple(values.shape) == shape
        if values.dtype not in dtypes or not fits:
            raise self._misfit(part, values, dtypes, shape)
        return values

    def matrix(self, part: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, int]) -> Tensor:
        """As `get`; one number a tensor comes as [] or [1], one a row as [N] from some tools."""
        values = self._any(part)
        found = values if values.dim() == 2 else values.reshape(-1, 1)
        if values.dtype not in dtypes or tuple(found.shape) != shape:
            raise self._misfit(part, values, dtypes, shape)
        return found

    def number(self, part: str) -> Tensor:
        """One number of a floating dtype, whatever shape it is stored in: [1]."""
        values = self._any(part)
        if values.dtype not in HALVES or values.numel() != 1:
            raise self._misfit(part, values, HALVES, (1,))
        return values.reshape(1)

    def _any(self, part: str) -> Tensor:
        if not self.holds(part):
            raise missing(self.module, self.scheme, self.at(part))
        return self.read(self.at(part))

    def _misfit(
        self,
        part: str,
        values: Tensor,
        dtypes: tuple[torch.dtype, ...],
        shape: tuple[int, ...] | None,
    ) -> CheckpointError:
        kinds = " or ".join(_word(dtype) for dtype in dtypes)
        return CheckpointError(
            f"tensor {self.at(part)} is {_word(values.dtype)} {list(values.shape)} where"
            f" {self.scheme.describe()} needs {kinds}"
            f" {'[rows, columns]' if shape is None else list(shape)}; {_UNFIT}"
        )


@dataclass(frozen=True, slots=True)
class Beside:
    """What a weight has beside its codes and scales, checked by value: as in QuantizedTensor."""

    zero: Tensor | None = None
    g_idx: Tensor | None = None
    global_scale: Tensor | None = None
    input_scale: Tensor | None = None
    global_factor: Tensor | None = None
    input_factor: Tensor | None = None

    def around(self, codes: Tensor, scale: Tensor, scheme: QuantScheme) -> QuantizedTensor:
        """The weight with these codes [N, K] and scales."""
        return QuantizedTensor(
            codes,
            scale,
            self.zero,
            self.g_idx,
            scheme,
            global_scale=self.global_scale,
            input_scale=self.input_scale,
            global_factor=self.global_factor,
            input_factor=self.input_factor,
        )


def matrix_shape(module: str, scheme: QuantScheme, part: str, shape_of: ShapeOf) -> tuple[int, int]:
    """Shape of a part that must be a matrix; CheckpointError when it is missing or is none."""
    name = f"{module}.{part}"
    shape = shape_of(name)
    if shape is None:
        raise missing(module, scheme, name)
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(
            f"tensor {name} is {list(shape)} where {scheme.describe()} needs [rows, columns];"
            f" {_UNFIT}"
        )
    return shape[0], shape[1]


def missing(module: str, scheme: QuantScheme, name: str) -> CheckpointError:
    return CheckpointError(
        f"{module}: {scheme.describe()} needs tensor {name}, which is missing; the checkpoint is"
        " incomplete or its quantization_config is wrong"
    )


def positive(name: str, value: Tensor) -> Tensor:
    """The tensor called `name`, [1]; CheckpointError unless it is a positive number."""
    if not bool((value > 0).all() & torch.isfinite(value).all()):
        raise CheckpointError(
            f"tensor {name} is {_word(value.dtype)} {list(value.shape)} with {value.tolist()}; it"
            " must hold one positive number"
        )
    return value


def one_number(name: str, value: Tensor) -> Tensor:
    """The tensor called `name`: [1]; CheckpointError unless it is a positive number of a floating
    dtype, whatever shape it is stored in."""
    if value.dtype not in HALVES or value.numel() != 1:
        raise CheckpointError(
            f"tensor {name} is {_word(value.dtype)} {list(value.shape)}; it must hold one positive"
            " number"
        )
    return positive(name, value.reshape(1))


def group_order(name: str, g_idx: Tensor, scheme: QuantScheme) -> Tensor | None:
    """The group of every column, [K]; None where each is in the group of its place.

    name: of the tensor. CheckpointError unless every group gets as many columns as it has.
    """
    columns = g_idx.shape[0]
    usual = torch.arange(columns) // scheme.columns_per_scale(columns)
    groups = g_idx.long()
    if torch.equal(groups, usual):
        return None
    last = scheme.groups(columns) - 1
    if bool(((groups < 0) | (groups > last)).any()):
        raise CheckpointError(
            f"tensor {name} holds groups {int(groups.min())} to {int(groups.max())}; there are"
            f" scales for 0 to {last}"
        )
    found, wanted = groups.bincount(minlength=last + 1), usual.bincount()
    if not torch.equal(found, wanted):
        bad = int((found != wanted).nonzero()[0])
        raise CheckpointError(
            f"tensor {name} puts {int(found[bad])} columns into group {bad}, where"
            f" {int(wanted[bad])} belong; it is damaged, so download the checkpoint again"
        )
    return g_idx


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
