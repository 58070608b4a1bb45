"""Rotary embeddings: which frequencies a decoder rotates its queries and keys with, as data.

Read from config.json as transformers 5.23 reads it: `rope_parameters`, or the older keys
`rope_scaling` and `rope_theta` beside it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from compress.arch.forward.values import flag, number, optional, refuse, whole

NAMES = ("rope_scaling", "rope_parameters")  # the first that is there and not empty counts


@dataclass(frozen=True, slots=True)
class Rope:
    """dim: so many numbers of a head are rotated, its first ones, the halves against each other;
    one more where it is odd.

    kind: how frequencies follow from theta, a key of KINDS. parameters: what that kind needs, all
    of it, checked; `attention_factor` (yarn, longrope) multiplies sine and cosine.
    """

    dim: int
    theta: float
    kind: str
    parameters: Mapping[str, Any]

    @property
    def length(self) -> int | None:
        """Texts longer than this have other frequencies; None where length does not matter."""
        p = self.parameters
        if self.kind == "longrope" and p["short_factor"] == p["long_factor"]:
            return None
        key = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
        return self.parameters[key[self.kind]] if self.kind in key else None

    def variant(self, length: int) -> int:
        """Texts that came with lengths of one variant have the same rotation at each position:
        longrope has one set of frequencies for all that are longer, dynamic one for each length."""
        most = self.length
        if most is None or length <= most:
            return 0
        return 1 if self.kind == "longrope" else length


@dataclass(frozen=True, slots=True)
class RopeRule:
    """What a family assumes.

    theta: where config.json has none. theta_key, part_key: older keys beside the parameters.
    part: of a head that is rotated where config.json does not say; None for a family that rotates
        whole heads only. kinds: older names of kinds. only: the kinds it takes, () for all.
    original: original_max_position_embeddings where config.json does not have it beside the
        parameters; None for what the parameters say, or else max_position_embeddings.
    absent: the parameters where config.json has none; of the default kind when empty.
    """

    theta: float = 10_000.0
    theta_key: str = "rope_theta"
    part_key: str = "partial_rotary_factor"
    part: float | None = None
    kinds: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    only: tuple[str, ...] = ()
    original: int | None = None
    absent: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def rope_of(rule: RopeRule, text: Mapping[str, Any], head_dim: int, context: int) -> Rope:
    """The one rotation of a decoder. context: positions it reads, 0 where that is unknown.

    Raises CheckpointError with key, value and remedy.
    """
    name = next((name for name in NAMES if text.get(name)), NAMES[1])
    given = rule.absent if text.get(name) is None else text[name]
    return read_rope(rule, text, given, name, head_dim, context)


def read_rope(
    rule: RopeRule,
    text: Mapping[str, Any],
    given: object,
    place: str,
    head_dim: int,
    context: int,
) -> Rope:
    """A rotation by its parameters `given`, which config.json has at `place`."""
    if not isinstance(given, Mapping) or any(isinstance(x, Mapping) for x in given.values()):
        raise refuse(place, given, "it must be one mapping of names to numbers")
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = rule.kinds.get(kind, kind) if isinstance(kind, str) else kind
    known = rule.only or tuple(KINDS)
    if kind not in known:
        raise refuse(f"{place}.rope_type", kind, f"known are {', '.join(known)}")
    theta = number(text, rule.theta_key, rule.theta)
    theta = number(given, "rope_theta", theta, f"{place}.rope_theta")
    part = _part(rule, text, given, place)
    dim = int(head_dim * part)
    if not 0 < dim + dim % 2 <= head_dim:
        raise refuse(f"{place}.partial_rotary_factor", part, f"a head has {head_dim} numbers")
    stretch = Stretch(
        place, dim, context, text.get("original_max_position_embeddings") or rule.original
    )
    return Rope(dim, theta, kind, MappingProxyType(KINDS[kind](given, stretch)))


@dataclass(frozen=True, slots=True)
class Stretch:
    """place: of the parameters. dim: as Rope. context: positions the decoder reads. before: those
    it read before it was stretched, where config.json has that beside the parameters, or the family
    assumes it.
    """

    place: str
    dim: int
    context: int
    before: int | None

    def positions(self) -> int:
        return whole(
            {"max_position_embeddings": self.context or None}, "max_position_embeddings", None
        )

    def original(self, given: Mapping[str, Any]) -> int:
        key = "original_max_position_embeddings"
        if self.before is not None:
            return whole({key: self.before}, key, None)
        if given.get(key) is None:
            return self.positions()
        return whole(given, key, None, f"{self.place}.{key}")


def _part(rule: RopeRule, text: Mapping[str, Any], given: Mapping[str, Any], place: str) -> float:
    part = number(text, rule.part_key, rule.part or 1.0)
    part = number(given, "partial_rotary_factor", part, f"{place}.partial_rotary_factor")
    if part > 1 or (rule.part is None and part != 1):
        most = "1, as this family rotates whole heads" if rule.part is None else "at most 1"
        raise refuse(f"{place}.partial_rotary_factor", part, f"it must be {most}")
    return part


def _default(given: Mapping[str, Any], stretch: Stretch) -> dict[str, Any]:
    return {}


def _factor(given: Mapping[str, Any], stretch: Stretch) -> float:
    return number(given, "factor", None, f"{stretch.place}.factor")


def _linear(given: Mapping[str, Any], stretch: Stretch) -> dict[str, Any]:
    return {"factor": _factor(given, stretch)}


def _dynamic(given: Mapping[str, Any], stretch: Stretch) -> dict[str, Any]:
    if stretch.dim <= 2:
        raise refuse(f"{stretch.place}.rope_type", "dynamic", "it needs more than one pair a head")
    return {"factor": _factor(given, stretch), "max_position_embeddings": stretch.positions()}


def _llama3(given: Mapping[str, Any], stretch: Stretch) -> dict[str, Any]:
    place = stretch.place
    low = number(given, "low_freq_factor", None, f"{place}.low_freq_factor")
    high = number(given, "high_freq_factor", None, f"{place}.high_freq_factor")
    if low == high:
        raise refuse(f"{place}.high_freq_factor", high, "it must differ from low_freq_factor")
    return {
        "factor": _factor(given, stretch),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": stretch.original(given),
    }


def _yarn(given: Mapping[str, Any], stretch: Stretch) -> dict[str, Any]:
    place, original = stretch.place, stretch.original(given)
    factor = number(given, "factor", stretch.context / original or None, f"{place}.factor")
    scale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    inferred = yarn_scale(factor)
    if scale and all_dim:
        scale = number(given, "mscale", None, f"{place}.mscale")
        all_dim = number(given, "mscale_all_dim", None, f"{place}.mscale_all_dim")
        inferred = yarn_scale(factor, scale) / yarn_scale(factor, all_dim)
    return {
        "factor": factor,
        "attention_factor": number(
            given, "attention_factor", inferred, f"{place}.attention_factor"
        ),
        "beta_fast": number(given, "beta_fast", 32.0, f"{place}.beta_fast"),
        "beta_slow": number(given, "beta_slow", 1.0, f"{place}.beta_slow"),
        "truncate": flag(given, "truncate", True),
        "original_max_position_embeddings": stretch.original(given),
    }


def yarn_scale(factor: float, scale: float = 1.0) -> float:
    """What attention is sharpened by where a rotation is stretched (arXiv 2309.00071)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(given: Mapping[str, Any], stretch: Stretch) -> dict[str, Any]:
    place, original = stretch.place, stretch.original(given)
    factor = optional(given, "factor", None) or stretch.positions() / original
    inferred = 1.0
    if factor > 1:
        inferred = math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "short_factor": _factors(given, "short_factor", stretch),
        "long_factor": _factors(given, "long_factor", stretch),
        "attention_factor": number(
            given, "attention_factor", inferred, f"{place}.attention_factor"
        ),
        "original_max_position_embeddings": original,
    }


def _factors(given: Mapping[str, Any], key: str, stretch: Stretch) -> tuple[float, ...]:
    values, wanted = given.get(key), (stretch.dim + 1) // 2
    if not isinstance(values, list) or len(values) != wanted:
        raise refuse(f"{stretch.place}.{key}", values, f"it must be a list of {wanted} numbers")
    return tuple(number({key: x}, key, None, f"{stretch.place}.{key}") for x in values)


# Kind -> its parameters, checked and complete.
KINDS: Mapping[str, Callable[[Mapping[str, Any], Stretch], dict[str, Any]]] = MappingProxyType(
    {
        "default": _default,
        "linear": _linear,
        "dynamic": _dynamic,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
    }
)
