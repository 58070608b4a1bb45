"""A form of weights as one value: what a row of the tables must have, so that mypy checks it."""

import sys
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from compress.errors import RequestError
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import InputQuantization
from compress_kernels.cpu.levels import InstructionSetError
from compress_kernels.cpu.library import instruction_sets
from compress_kernels.panels import Math


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How an engine computes: settled when it opens, the same for all of its linears.

    dtype: of what goes into products and comes out of them. isa: the instruction sets that compiled
    kernels may use there (compress_kernels.cpu.library.instruction_sets); none on a GPU. math: what
    products may change of dequantize()'s numbers and of their inputs; it belongs to an open engine,
    as texts in it share keys and values. most_decoded: a weight whose codes no product reads is
    decoded once on the CPU if it has no more numbers, else for every product. all_decoded: so are
    those that a product would read.
    """

    dtype: torch.dtype
    device: torch.device
    isa: frozenset[str] = frozenset()
    math: Math = "exact"
    most_decoded: int = sys.maxsize
    all_decoded: bool = False

    @classmethod
    def here(
        cls, dtype: torch.dtype, device: torch.device | str, math: Math = "exact"
    ) -> "Arithmetic":
        """On a device of this machine. RequestError for a COMPRESS_MODEL_ISA that it cannot run."""
        place = torch.device(device)
        try:
            isa = instruction_sets() if place.type == "cpu" else frozenset[str]()
        except InstructionSetError as error:
            raise RequestError(str(error)) from None
        return cls(dtype, place, isa, math)


@dataclass(frozen=True, slots=True)
class LinearFacts:
    """What headers and config say of a linear's weight before it is read.

    shape: (N, K). scheme: of its codes and of its inputs, None for a dense weight. stored: dtype of
    the dense weight in the file, or of the scales. plain: dtype that the decoded weight is rounded
    to once, a dense one's own. factored: inputs are multiplied by numbers of their columns first.
    blocks: the type of a weight that lies in GGUF's blocks, which has no scheme of ours.
    """

    shape: tuple[int, int]
    scheme: QuantScheme | None
    stored: torch.dtype
    plain: torch.dtype
    factored: bool = False
    blocks: str | None = None

    @property
    def coded(self) -> bool:
        """Whether there are codes, of either kind."""
        return self.scheme is not None or self.blocks is not None

    def describe(self) -> str:
        """How it is stored."""
        return self.blocks or ("dense" if self.scheme is None else self.scheme.describe())


class LinearWeight(Protocol):
    """A weight [N, K] in some form, with its product."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int:
        """All that is kept."""

    def matmul(self, x: Tensor, inputs: InputQuantization | None, bias: Tensor | None) -> Tensor:
        """x: [rows, K] -> [rows, N] in its dtype, with bias [N] added.

        inputs: how each token of x is rounded before, by itself, None for not at all. Rows come in
        the multiples that compress_kernels.ops.linear.row_multiple names; the bits of each then
        depend on nothing but itself.
        """

    def joined(self, others: "tuple[LinearWeight, ...]") -> "LinearWeight | None":
        """One weight with the rows of this one and, behind them, of the others; None where they
        stay apart."""


Source = TypeVar("Source", contravariant=True)


class LinearForm(Protocol[Source]):
    """A row of a table. Source: Tensor [N, K] for dense weights, QuantizedTensor for codes,
    BlockTensor for GGUF's blocks."""

    @property
    def name(self) -> str:
        """As in "12 linears are ...": a noun in the plural."""

    @property
    def joins(self) -> bool:
        """Whether weights that read one input become one (LinearWeight.joined)."""

    def why_not(self, facts: LinearFacts, how: Arithmetic) -> str | None:
        """Why such a weight does not take this form there; None where it does."""

    def nbytes(self, facts: LinearFacts, how: Arithmetic) -> int:
        """What the packed weight will keep: what is one number for many weights may be left out."""

    def pack(self, weight: Source, facts: LinearFacts, how: Arithmetic) -> LinearWeight:
        """The weight on `how.device`, in memory of its own unless it lies there as it should."""
