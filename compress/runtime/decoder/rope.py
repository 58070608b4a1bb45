"""Rotary embeddings: sine and cosine of every token, and what they do to queries and keys.

Frequencies are those of transformers 5.23. Two kinds depend on the length of the text: longrope has
two sets of them, dynamic grows theta. transformers takes the length from whatever is in one call;
here it is that of the prompt, or of the text up to the token where that is longer. So a token's
rotation is what transformers gives it in a forward of the prompt and a step for every token after
it, but it depends on neither chunks nor neighbours.

Elementwise functions are those whose result does not depend on where in a tensor a number lies;
torch.pow is not among them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from compress.arch.forward.rope import Rope


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """frequencies: fp32 [pairs], of short texts. long: fp32 [pairs], longrope's other ones."""

    rope: Rope
    frequencies: Tensor
    long: Tensor | None

    @classmethod
    def of(cls, rope: Rope, device: torch.device) -> "Rotation":
        short, long = FREQUENCIES[rope.kind](rope)
        return cls(rope, short.to(device), None if long is None else long.to(device))

    def angles(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, fp32 [T, pairs] each, times the attention factor.

        positions: int64 [T]. lengths: int64 [T], of the prompt that a token's text came with.
        """
        most = self.rope.length
        if most is None:
            angles = positions.float()[:, None] * self.frequencies
        else:
            seen = torch.maximum(positions + 1, lengths)[:, None]
            longer = self._grown(seen) if self.long is None else self.long
            angles = positions.float()[:, None] * torch.where(seen > most, longer, self.frequencies)
        factor = self.rope.parameters.get("attention_factor", 1.0)
        return angles.cos() * factor, angles.sin() * factor

    def _grown(self, seen: Tensor) -> Tensor:
        """Dynamic frequencies, fp32 [T, pairs], of texts of `seen` tokens, int64 [T, 1]."""
        dim, factor = self.rope.dim, self.rope.parameters["factor"]
        ratio = (
            seen.clamp(min=self.rope.length).double()
            / self.rope.parameters["max_position_embeddings"]
        )
        stretch = (factor * ratio - (factor - 1)).log() * (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, device=seen.device).double() / dim
        grown: Tensor = ((math.log(self.rope.theta) + stretch) * -exponents).exp()
        return grown.float()


_Frequencies = tuple[Tensor, Tensor | None]


def _default(rope: Rope) -> _Frequencies:
    return 1.0 / _periods(rope), None


def _periods(rope: Rope) -> Tensor:
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    periods: Tensor = rope.theta**exponents
    return periods


def _linear(rope: Rope) -> _Frequencies:
    return 1.0 / _periods(rope) / rope.parameters["factor"], None


def _llama3(rope: Rope) -> _Frequencies:
    """Long waves are stretched by `factor`, short ones are not, those between in part."""
    p, plain = rope.parameters, 1.0 / _periods(rope)
    original, low, high = (
        p["original_max_position_embeddings"],
        p["low_freq_factor"],
        p["high_freq_factor"],
    )
    waves = 2 * math.pi / plain
    stretched = torch.where(waves > original / low, plain / p["factor"], plain)
    part = (original / waves - low) / (high - low)
    between = (1 - part) * stretched / p["factor"] + part * stretched
    medium = ~(waves < original / high) & ~(waves > original / low)
    return torch.where(medium, between, stretched), None


def _yarn(rope: Rope) -> _Frequencies:
    """As llama3's, the border given in rotations over the original length (arXiv 2309.00071)."""
    p, periods = rope.parameters, _periods(rope)
    low, high = (_turning_dim(rope, p[name]) for name in ("beta_fast", "beta_slow"))
    if p["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high += 0.001 if low == high else 0
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)
    plain = 1 - ramp.clamp(0, 1)
    return 1.0 / (p["factor"] * periods) * (1 - plain) + 1.0 / periods * plain, None


def _turning_dim(rope: Rope, rotations: float) -> float:
    """The dimension that turns so often over the original length."""
    original = rope.parameters["original_max_position_embeddings"]
    turns = math.log(original / (rotations * 2 * math.pi))
    return rope.dim * turns / (2 * math.log(rope.theta))


def _longrope(rope: Rope) -> _Frequencies:
    periods = _periods(rope)
    short, long = (torch.tensor(rope.parameters[f"{x}_factor"]) for x in ("short", "long"))
    return 1.0 / (short * periods), 1.0 / (long * periods)


# Kind -> frequencies of short texts, and longrope's of long ones.
FREQUENCIES: Mapping[str, Callable[[Rope], _Frequencies]] = MappingProxyType(
    {
        "default": _default,
        "linear": _linear,
        "dynamic": _default,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
    }
)
