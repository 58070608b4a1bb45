"""The tensors of one quantized module, read by name and checked against what its scheme needs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.quant.scheme import QuantScheme

Has = Callable[[str], bool]
Read = Callable[[str], Tensor]
ShapeOf = Callable[[str], tuple[int, ...] | None]

HALVES = (torch.float16, torch.bfloat16, torch.float32)
WORDS = (torch.int32,)


@dataclass(frozen=True, slots=True)
class Stored:
    """has, read: the checkpoint's names and its reader."""

    module: str
    scheme: QuantScheme
    has: Has
    read: Read

    def get(
        self, part: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """The tensor called `part` below the module; CheckpointError when it is missing or is
        not what it must be. shape: None for any matrix."""
        name = f"{self.module}.{part}"
        if not self.has(name):
            raise missing(self.module, self.scheme, name)
        values = self.read(name)
        fits = values.dim() == 2 if shape is None else tuple(values.shape) == shape
        if values.dtype not in dtypes or not fits:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise CheckpointError(
                f"tensor {name} is {str(values.dtype).removeprefix('torch.')}"
                f" {list(values.shape)} where {self.scheme.describe()} needs {kinds}"
                f" {'[rows, columns]' if shape is None else list(shape)}; the tensors and"
                " quantization_config do not belong together"
            )
        return values


def matrix_shape(module: str, scheme: QuantScheme, part: str, shape_of: ShapeOf) -> tuple[int, int]:
    """Shape of a part that must be a matrix; CheckpointError when it is missing or is none."""
    name = f"{module}.{part}"
    shape = shape_of(name)
    if shape is None:
        raise missing(module, scheme, name)
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(
            f"tensor {name} is {list(shape)} where {scheme.describe()} needs [rows, columns]; the"
            " tensors and quantization_config do not belong together"
        )
    return shape[0], shape[1]


def missing(module: str, scheme: QuantScheme, name: str) -> CheckpointError:
    return CheckpointError(
        f"{module}: {scheme.describe()} needs tensor {name}, which is missing; the checkpoint is"
        " incomplete or its quantization_config is wrong"
    )
