"""The mixtures of types that llama.cpp's users know by name: which tensor gets which type.

Facts are those of llama-quantize of October 2026 (llama-quant.cpp), which gives more bits to what
loses most: values, the down projection, and the first and last layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from compress.errors import RecipeError
from compress.quant.ggml_kinds import KINDS


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor stands.

    part: its name in a block without ".weight", such as attn_v or ffn_down_exps. layer, layers: its
    block, of how many. experts: of the model, 0 without. sharing: query heads that share a head of
    keys and values. large: a model of 80 layers, whose values are few beside all else.
    weighed: importance of the columns is known.
    """

    part: str
    layer: int
    layers: int
    experts: int
    sharing: int
    large: bool = False
    weighed: bool = False

    @property
    def outer(self) -> bool:
        """Whether llama.cpp spends more on the layer: the first and last eighth, and every third in
        between."""
        i, eighth = self.layer, self.layers // 8
        return i < eighth or i >= 7 * self.layers // 8 or (i - eighth) % 3 == 2


Rule = Callable[[TensorPlace], str | None]


@dataclass(frozen=True, slots=True)
class TypeMixture:
    """base: the type of everything that no rule names. values, down, out: of attn_v (and attn_qkv),
    ffn_down and attn_output; a rule that returns None leaves the base. file_type: LlamaFileType.
    pure: every matrix is of the base type, embedding and head too."""

    name: str
    base: str
    file_type: int
    values: Rule = lambda at: None
    down: Rule = lambda at: None
    out: Rule = lambda at: None
    pure: bool = False

    @property
    def bits(self) -> float:
        """A weight of the base type."""
        return KINDS[self.base].bits

    def kind(self, at: TensorPlace) -> str:
        """The type of a linear in a block."""
        if self.pure:
            return self.base
        part = at.part.removesuffix("_exps")
        if part in ("attn_v", "attn_qkv"):
            found = self.values(at) or self.base
            if at.large and found in ("Q3_K", "Q4_K"):
                found = "Q5_K"
            return "Q8_0" if at.experts == 8 else found
        if part == "attn_k" and at.experts == 8:
            return "Q8_0"
        if part == "ffn_down":
            return self.down(at) or self.base
        if part == "attn_output":
            if at.experts == 8:
                return "Q5_K" if self.name in WITH_EIGHT_EXPERTS else self.base
            return self.out(at) or self.base
        return self.base

    def head(self, columns: int) -> str:
        """The type of the output head, and of an embedding that is the head, too."""
        if self.pure:
            return self.base
        if self.base == "Q8_0" or columns % KINDS[self.base].block:
            return "Q8_0"
        return "Q6_K"


# Those that give attn_output 5 bits in a mixture of eight experts.
WITH_EIGHT_EXPERTS = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ4_XS")


def _always(kind: str) -> Rule:
    return lambda at: kind


def _outer(kind: str) -> Rule:
    return lambda at: kind if at.outer else None


def _first(kind: str, layers: int) -> Rule:
    return lambda at: kind if at.layer < layers else None


def _first_part(kind: str, parts: int, rest: str | None = None) -> Rule:
    """In the first of so many parts of the layers."""
    return lambda at: kind if at.layer < at.layers // parts else rest


def _shared(kind: str, rest: str | None = None) -> Rule:
    """Where four query heads or more share a head of values."""
    return lambda at: kind if at.sharing >= 4 else rest


def _unweighed(at: TensorPlace) -> str | None:
    """IQ4's types without importance."""
    return "Q5_K" if at.layer < at.layers // 8 and not at.weighed else None


def _fours(kind: str) -> Rule:
    """Q4_0 and Q5_0 with importance."""
    return lambda at: kind if at.weighed and at.layer < at.layers // 8 else None


_ALL = (
    TypeMixture("Q2_K", "Q2_K", 10, _shared("Q4_K", "Q3_K"), _always("Q3_K"), _always("Q3_K")),
    TypeMixture("Q3_K_S", "Q3_K", 11),
    TypeMixture(
        *("Q3_K_M", "Q3_K", 12),
        values=lambda at: "Q5_K" if at.layer < 2 else "Q4_K",
        down=_first_part("Q5_K", 16, "Q4_K"),
        out=_always("Q4_K"),
    ),
    TypeMixture("Q3_K_L", "Q3_K", 13, _always("Q5_K"), _always("Q5_K"), _always("Q5_K")),
    TypeMixture("IQ4_XS", "IQ4_XS", 30, _shared("Q5_K"), _unweighed),
    TypeMixture("IQ4_NL", "IQ4_NL", 25, _shared("Q5_K"), _unweighed),
    TypeMixture("Q4_0", "Q4_0", 2, down=_fours("Q4_1")),
    TypeMixture("Q4_1", "Q4_1", 3),
    TypeMixture("Q4_K_S", "Q4_K", 14, _first("Q5_K", 4), _first_part("Q5_K", 8)),
    TypeMixture("Q4_K_M", "Q4_K", 15, _outer("Q6_K"), _outer("Q6_K")),
    TypeMixture("Q5_0", "Q5_0", 8, down=_fours("Q5_1")),
    TypeMixture("Q5_1", "Q5_1", 9),
    TypeMixture("Q5_K_S", "Q5_K", 16),
    TypeMixture("Q5_K_M", "Q5_K", 17, _outer("Q6_K"), _outer("Q6_K")),
    TypeMixture("Q6_K", "Q6_K", 18),
    TypeMixture("Q8_0", "Q8_0", 7),
)
MIXTURES: Mapping[str, TypeMixture] = MappingProxyType({mixture.name: mixture for mixture in _ALL})
ALIASES: Mapping[str, str] = MappingProxyType(
    {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
)
# Types that all matrices may have alike, as llama-quantize's --pure makes them.
PURE = tuple(name for name, kind in KINDS.items() if kind.block > 1)
# What llama.cpp takes where rows are no whole blocks of a type.
FALLBACKS: Mapping[str, str] = MappingProxyType(
    {
        "Q2_K": "Q4_0",
        "Q3_K": "Q4_0",
        "IQ4_XS": "IQ4_NL",
        "Q4_K": "Q5_0",
        "Q5_K": "Q5_1",
        "Q6_K": "Q8_0",
    }
)


def mixture_of(name: str, option: str = "--type") -> TypeMixture:
    """By its name in llama.cpp, in any case of letters. RecipeError for one that is not here.

    option: what the message calls the name.
    """
    asked, _, pure = name.strip().upper().partition(":")
    found = MIXTURES.get(ALIASES.get(asked, asked))
    if pure == "PURE" and asked in PURE:
        return TypeMixture(f"{asked}:pure", asked, KINDS[asked].file_type, pure=True)
    if pure or found is None:
        alone = f"; {', '.join(f'{x}:pure' for x in PURE)} give every matrix one type"
        raise RecipeError(f"{option} is {name!r}; known are {', '.join(MIXTURES)}{alone}")
    return found


def type_of(name: str, option: str) -> str:
    """A type alone, a key of KINDS, by its name in any case of letters. RecipeError for one that
    weights are not rounded to; option: what the message calls it."""
    found = name.strip().upper()
    if found not in PURE:
        raise RecipeError(f"{option} is {name!r}; the types are {', '.join(PURE)}")
    return found


def fitting(kind: str, columns: int) -> str:
    """The type itself where rows of so many numbers are whole blocks of it, else its fallback;
    F16 where those do not fit either."""
    if columns % KINDS[kind].block == 0:
        return kind
    fallback = FALLBACKS.get(kind, "F16")
    return fallback if columns % KINDS[fallback].block == 0 else "F16"
