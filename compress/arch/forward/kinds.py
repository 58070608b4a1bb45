"""Kinds of layers: how a layer reads the positions of a text, and what it keeps of them."""

from dataclasses import dataclass
from typing import Literal, Protocol

from compress.arch.forward.rope import Rope
from compress.arch.layer_cache import LayerCache, keys_and_values, latent_cache


class LayerKind(Protocol):
    """What every kind says of itself. A kind is a frozen record; layers that compute the same way
    have equal ones.

    window: number of positions that a token sees, its own included; None for its own and all
        before it.
    rope: the rotation of queries and keys; None where nothing is rotated.
    products: multiplications that one token needs for one position that it sees.
    """

    @property
    def window(self) -> int | None: ...

    @property
    def rope(self) -> Rope | None: ...

    @property
    def products(self) -> int: ...

    def cache(self) -> LayerCache:
        """What one token leaves in this layer for later tokens."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Grouped-query attention: a group of query heads reads one head of keys and values. MHA has
    one query head a group, MQA one group.

    heads: number of query heads. kv_heads: number of heads of keys and values, a divisor of heads.
    key_width: numbers in a head of queries or keys. value_width: numbers in a head of values.
    window, rope: see LayerKind.
    scale: the factor of the products of queries and keys.
    softcap: the c of c * tanh(score / c), which bounds scores; None where they are not bounded.
    qk_norm: the norm of queries and keys: "head" over each head, "full" over all heads together,
        None without one.
    qkv: the order of rows in a fused q/k/v: "parts" has all of q, then k, then v; "heads" has q, k
        and v of each head in turn.
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
        """Numbers of a token in all heads together: of queries, keys and values."""
        return (
            self.heads * self.key_width,
            self.kv_heads * self.key_width,
            self.kv_heads * self.value_width,
        )

    @property
    def turned_scale(self) -> float:
        """What products of queries and keys are multiplied by, by the rotation of both too."""
        factor = 1.0 if self.rope is None else self.rope.parameters.get("attention_factor", 1.0)
        return self.scale * float(factor) ** 2

    def cache(self) -> LayerCache:
        """Keys and values."""
        return keys_and_values(self.kv_heads, self.key_width, self.value_width)


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention (MLA, arXiv 2405.04434): a token leaves one latent, of which keys and values
    of all heads are made, and one rotated key for all heads.

    A head's score is its query against its key of the latent, plus the rotated part of its query
    against the rotated key. Keys and values are linear in the latent, so queries go into its space
    first and values come out of it last: each head then reads `rank` + `rotated` numbers a token.

    heads: number of query heads. rank: numbers of the latent. rotated: of the rotated key, and the
    last numbers of a head of queries. nope: numbers of a head of queries before them, and of a key
    that a head makes of the latent. value_width: of a value. query_rank: of the latent of queries,
    None where they have none.
    rope: see LayerKind. interleaved: it turns neighbours, and leaves the first of each pair in the
    first half. scale: the factor of the products. eps: of the norms of both latents.
    """

    heads: int
    rank: int
    rotated: int
    nope: int
    value_width: int
    query_rank: int | None
    rope: Rope | None
    interleaved: bool
    scale: float
    eps: float

    @property
    def window(self) -> None:
        """Every position is seen."""
        return None

    @property
    def softcap(self) -> None:
        """Scores are not bounded."""
        return None

    @property
    def key_width(self) -> int:
        """Numbers in a head of queries."""
        return self.nope + self.rotated

    @property
    def products(self) -> int:
        return self.heads * (2 * self.rank + self.rotated)

    def cache(self) -> LayerCache:
        """The latent, and the rotated key behind it."""
        return latent_cache(self.rank, self.rotated)
