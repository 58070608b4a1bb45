"""Weights of any checkpoint that we can read, by the names of the original model.

`Weights` is what all others ask: a checkpoint that was opened once, what is known of its decoder,
and every tensor, whether it is stored as it is (`DenseWeights`), as codes (`CodedWeights`) or in a
GGUF file (`GgufWeights`).
"""

from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from compress.arch.spec import BlockSpec, DecoderSpec
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.formats import conv1d, dense
from compress.formats.format import Format
from compress.formats.stored import Beside
from compress.formats.table import FORMATS
from compress.quant.activations import rounds_together
from compress.quant.blocks import BlockTensor
from compress.quant.scheme import ActivationScheme, QuantScheme
from compress.quant.tensor import InputQuantization, OutlierColumns, QuantizedTensor


class Weights(Protocol):
    """An open checkpoint, dense or compressed.

    A linear is named by its module, a tensor by its own name; both are those of the original.
    checkpoint: where the tensors lie, with config and side files. spec: its decoder. format: its
    row of FORMATS.
    """

    @property
    def checkpoint(self) -> Checkpoint: ...

    @property
    def spec(self) -> DecoderSpec: ...

    @property
    def format(self) -> Format: ...

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """All that its tensors lie in: the checkpoint, and the file of outlier columns beside it
        where there is one."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the original's tensors, in file order: a compressed weight's parts
        are one `x.weight` of its original shape."""

    @property
    def plain_dtype(self) -> torch.dtype:
        """Dtype of the tensors that are not quantized."""

    @property
    def kv_cache(self) -> ActivationScheme | None:
        """How keys and values are stored in the cache; None for as they are."""

    def with_checkpoint(self, checkpoint: Checkpoint) -> Self:
        """The same of a checkpoint with the same tensors, whose config says something else."""

    def read(self, tensor: str, *, check_finite: bool = False) -> Tensor:
        """A weight in its original order: a quantized one rounded once to `plain_dtype`, any other
        as it is stored.

        check_finite: CheckpointError with number and place of NaN and infinity.
        """

    def read_rows(
        self, tensor: str, start: int, stop: int, *, check_finite: bool = False
    ) -> Tensor:
        """Rows start..stop of dimension 0 of what `read` gives. A quantized weight is decoded whole
        for them."""

    def stored_in(self, tensor: str) -> str | None:
        """What a tensor of the original is stored in under a name of its own: a dtype code, or a
        type of GGUF's; None where there is none, or parts of another name hold it."""

    def is_quantized(self, linear: str) -> bool:
        """Whether the weight of a linear is stored as codes."""

    def scheme(self, linear: str) -> QuantScheme | None:
        """Scheme of a linear; None when it is stored dense, and when the config says nothing of
        it."""

    def transposed(self, linear: str) -> bool:
        """Whether the original stores a linear's weight as [K, N]; its codes are [N, K]."""

    def quantized(self, tensor: str) -> QuantizedTensor | None:
        """Codes and scales [N, K] of a weight, None when it is stored dense, and in blocks of GGUF,
        which `read` decodes."""

    def blocks(self, tensor: str, *, check_finite: bool = False) -> BlockTensor | None:
        """Rows [N, bytes] of a weight that a GGUF file stores in blocks, None of any other: those
        of [N, K], also where the original stores it as [K, N].

        check_finite: as `read` has it.
        """

    def outlined(self, tensor: str) -> QuantizedTensor | None:
        """As `quantized`, with codes and outliers' weights on the device meta: they are not
        read."""

    def beside(self, linear: str) -> Beside:
        """What a quantized weight has beside codes and scales, which are not read; nothing for a
        dense one. CheckpointError for values that cannot be."""

    def outliers(self, tensor: str) -> OutlierColumns | None:
        """Columns that calibration fixed for a quantized weight, None where it did not."""

    def outlier_columns(self, linear: str) -> int | None:
        """How many those are; no weight is read."""

    def activation(self, linear: str) -> InputQuantization | None:
        """How the inputs of a linear are quantized at run time, with its scale [1] where that is
        static and its outlier columns where calibration fixed them; None for not at all."""

    def cache(self, block: BlockSpec) -> tuple[InputQuantization, InputQuantization] | None:
        """Scheme and scale [1] of a block's keys and of its values in the cache, None for as they
        are."""


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A checkpoint that holds every weight as it is."""

    checkpoint: Checkpoint
    spec: DecoderSpec

    @property
    def format(self) -> Format:
        return FORMATS[dense.NAME]

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return (self.checkpoint,)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.checkpoint.shapes

    @property
    def plain_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.checkpoint.tensors[self.spec.embedding].dtype]

    @property
    def kv_cache(self) -> ActivationScheme | None:
        return None

    def with_checkpoint(self, checkpoint: Checkpoint) -> Self:
        return replace(self, checkpoint=checkpoint)

    def read(self, tensor: str, *, check_finite: bool = False) -> Tensor:
        return self.checkpoint.read(tensor, check_finite=check_finite)

    def read_rows(
        self, tensor: str, start: int, stop: int, *, check_finite: bool = False
    ) -> Tensor:
        return self.checkpoint.read_rows(tensor, start, stop, check_finite=check_finite)

    def stored_in(self, tensor: str) -> str | None:
        info = self.checkpoint.tensors.get(tensor)
        return None if info is None else info.dtype

    def is_quantized(self, linear: str) -> bool:
        return False

    def scheme(self, linear: str) -> QuantScheme | None:
        return None

    def transposed(self, linear: str) -> bool:
        return conv1d.by_config_or_family(self.checkpoint.config)(linear)

    def quantized(self, tensor: str) -> QuantizedTensor | None:
        return None

    def blocks(self, tensor: str, *, check_finite: bool = False) -> BlockTensor | None:
        return None

    def outlined(self, tensor: str) -> QuantizedTensor | None:
        return None

    def beside(self, linear: str) -> Beside:
        return Beside()

    def outliers(self, tensor: str) -> OutlierColumns | None:
        return None

    def outlier_columns(self, linear: str) -> int | None:
        return None

    def activation(self, linear: str) -> InputQuantization | None:
        return None

    def cache(self, block: BlockSpec) -> tuple[InputQuantization, InputQuantization] | None:
        return None


def rounds_calls(weights: Weights) -> bool:
    """Whether what a token is rounded to depends on the other tokens of a call, in some linear."""
    found = (weights.activation(linear.name) for linear in weights.spec.all_linears())
    return any(inputs is not None and rounds_together(inputs.scheme) for inputs in found)
