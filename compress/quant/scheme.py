"""How the numbers of a weight are stored, and the field's names for the usual choices."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from compress.errors import RecipeError

Granularity = Literal["tensor", "channel", "group"]


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """Integer activations, quantized at run time, one symmetric scale a token."""

    bits: int = 8


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Integer weight storage.

    Codes are signed, in [-2^(bits-1), 2^(bits-1) - 1]; a weight is (code - zero) * scale.
    `group_size` counts neighbouring input columns that share a scale; it is 0 unless
    `granularity` is "group".
    """

    bits: int = 4
    symmetric: bool = True
    granularity: Granularity = "group"
    group_size: int = 128
    activation: ActivationScheme | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise RecipeError(f"bits is {self.bits}; weights take 2 to 8 bits")
        if self.granularity == "group" and self.group_size < 1:
            raise RecipeError(f"group_size is {self.group_size}; a group holds 1 column or more")
        if self.granularity != "group" and self.group_size != 0:
            raise RecipeError(
                f"group_size is {self.group_size} with granularity {self.granularity!r};"
                " leave it out, or use granularity 'group'"
            )

    @property
    def code_min(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def code_max(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def columns_per_scale(self, in_features: int) -> int:
        """Input columns that share one scale in a weight of that width."""
        return self.group_size if self.granularity == "group" else in_features

    def groups(self, in_features: int) -> int:
        """Scales a row has (1 for channel and tensor granularity)."""
        return -(-in_features // self.columns_per_scale(in_features))

    def describe(self) -> str:
        """Short name for tables: `int4 sym g128`, `int8 asym channel a8`."""
        where = f"g{self.group_size}" if self.granularity == "group" else self.granularity
        sign = "sym" if self.symmetric else "asym"
        act = f" a{self.activation.bits}" if self.activation else ""
        return f"int{self.bits} {sign} {where}{act}"


_W8 = QuantScheme(bits=8, granularity="channel", group_size=0)

# compressed-tensors' and vLLM's names; W4A16 is symmetric in groups of 128, W8A16 per channel.
PRESETS: Mapping[str, QuantScheme] = MappingProxyType(
    {
        "W2A16": QuantScheme(bits=2),
        "W3A16": QuantScheme(bits=3),
        "W4A16": QuantScheme(bits=4),
        "W4A16_ASYM": QuantScheme(bits=4, symmetric=False),
        "W5A16": QuantScheme(bits=5),
        "W6A16": QuantScheme(bits=6),
        "W7A16": QuantScheme(bits=7),
        "W8A16": _W8,
        "W8A16_ASYM": replace(_W8, symmetric=False),
        "W8A8": replace(_W8, activation=ActivationScheme(bits=8)),
    }
)
