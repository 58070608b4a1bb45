"""Kinds of layers: how one looks at the positions of a text, and what it keeps of them."""

from dataclasses import dataclass
from typing import Literal, Protocol

from compress.arch.forward.rope import Rope
from compress.arch.layer_cache import LayerCache, keys_and_values


class LayerKind(Protocol):
    """What every kind says of itself. A kind is a frozen record: layers that compute alike are
    equal.

    window: positions that a token sees, itself included; None for all before it.
    rope: None where nothing is rotated.
    products: multiplications of one token with one position that it sees.
    """

    @property
    def window(self) -> int | None: ...

    @property
    def rope(self) -> Rope | None: ...

    @property
    def products(self) -> int: ...

    def cache(self) -> LayerCache:
        """What one token leaves behind."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Attention of heads, groups of which read one head of keys and values (GQA; MHA and MQA are
    its ends).

    heads: of queries. kv_heads: of keys and values, a divisor of them.
    key_width, value_width: numbers of a head of queries and keys, and of values.
    window, rope: as LayerKind.
    scale: what the products of queries and keys are multiplied by.
    softcap: c of c * tanh(score / c), None without.
    qk_norm: of queries and keys: "head" over each head, "full" over all heads together.
    qkv: how a fused q/k/v lies: "parts" (all of q, then k, then v) or "heads" (of each head).
    """

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    window: int | None
    rope: Rope | None
    scale: float
    softcap: float | None
    qk_norm: Literal["head", "full"] | None
    qkv: Literal["parts", "heads"]

    @property
    def products(self) -> int:
        return self.heads * (self.key_width + self.value_width)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of all heads together: queries, keys, values."""
        return (
            self.heads * self.key_width,
            self.kv_heads * self.key_width,
            self.kv_heads * self.value_width,
        )

    def cache(self) -> LayerCache:
        """Keys and values."""
        return keys_and_values(self.kv_heads, self.key_width, self.value_width)
