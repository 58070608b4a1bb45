"""The types of tensors in GGUF files, as ggml numbers them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

BLOCK, SUPER_BLOCK = 32, 256


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of tensor. number: GGMLQuantizationType. size: bytes of a block of `block` numbers.
    file_type: LlamaFileType of a file that is mostly of it (of the mixtures of Q3_K to Q5_K that
    llama.cpp knows, the smallest)."""

    name: str
    number: int
    block: int
    size: int
    file_type: int

    def nbytes(self, numel: int) -> int:
        return numel // self.block * self.size

    @property
    def bits(self) -> float:
        """A number takes, its share of scales and minima included."""
        return 8 * self.size / self.block

    def describe(self) -> str:
        """As a scheme does."""
        return self.name


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "F32": Kind("F32", 0, 1, 4, 0),
        "F16": Kind("F16", 1, 1, 2, 1),
        "BF16": Kind("BF16", 30, 1, 2, 32),
        "Q4_0": Kind("Q4_0", 2, BLOCK, 18, 2),
        "Q4_1": Kind("Q4_1", 3, BLOCK, 20, 3),
        "Q5_0": Kind("Q5_0", 6, BLOCK, 22, 8),
        "Q5_1": Kind("Q5_1", 7, BLOCK, 24, 9),
        "Q8_0": Kind("Q8_0", 8, BLOCK, 34, 7),
        "Q2_K": Kind("Q2_K", 10, SUPER_BLOCK, 84, 10),
        "Q3_K": Kind("Q3_K", 11, SUPER_BLOCK, 110, 11),
        "Q4_K": Kind("Q4_K", 12, SUPER_BLOCK, 144, 14),
        "Q5_K": Kind("Q5_K", 13, SUPER_BLOCK, 176, 16),
        "Q6_K": Kind("Q6_K", 14, SUPER_BLOCK, 210, 18),
        "IQ4_NL": Kind("IQ4_NL", 20, BLOCK, 18, 25),
        "IQ4_XS": Kind("IQ4_XS", 23, SUPER_BLOCK, 136, 30),
    }
)
