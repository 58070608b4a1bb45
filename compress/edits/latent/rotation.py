"""Which frequencies the shared key rotates at, and how config.json says it.

`stride` takes every so many-th frequency of a head, and `top` its fastest: both are what the class
makes of a theta. `any` takes each as often as it is worth it, and says them as factors of
`longrope`, the same for short and long texts, with an attention factor of 1.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch

from compress.arch.forward.rope import Rope
from compress.errors import RecipeError
from compress.runtime.decoder.rope import FREQUENCIES

Choice = Literal["any", "stride", "top"]


def strided(count: int, kept: int) -> tuple[int, ...]:
    """RecipeError where they are not every so many-th of `count`."""
    if kept > count:
        raise RecipeError(_more_than_a_head("stride", count, kept))
    if count % kept:
        fits = [2 * x for x in range(1, count + 1) if count % x == 0]
        raise RecipeError(
            f"rope_dim is {2 * kept}, which takes no equal steps through the {count} frequencies of"
            f" a head; with rope: stride it is one of {', '.join(map(str, fits))}"
        )
    return tuple(range(0, count, count // kept))


def fastest(count: int, kept: int) -> tuple[int, ...]:
    """RecipeError where there are fewer."""
    if kept > count:
        raise RecipeError(_more_than_a_head("top", count, kept))
    return tuple(range(kept))


def _more_than_a_head(rope: str, count: int, kept: int) -> str:
    return (
        f"rope_dim is {2 * kept}, and a head rotates {2 * count} numbers; with rope: {rope} it is"
        f" {2 * count} at most"
    )


# Frequencies that are known before anything is measured: of so many, so many.
KNOWN: Mapping[str, Callable[[int, int], tuple[int, ...]]] = MappingProxyType(
    {"stride": strided, "top": fastest}
)


def rope_parameters(
    rope: Rope, choice: Choice, frequencies: Sequence[int], context: int
) -> dict[str, Any]:
    """What config.json says of the shared key's rotation.

    RecipeError where the source's frequencies are no powers of a theta and are not written out.
    """
    kept = len(frequencies)
    if choice != "any" and rope.kind != "default":
        raise RecipeError(
            f"rope is {choice}, whose frequencies follow from a theta, and the model's are of the"
            f" kind {rope.kind}; take rope: any, which writes them out"
        )
    count = rope.dim // 2
    if rope.kind == "default" and kept <= count:  # `any` may come to the same
        if tuple(frequencies) == fastest(count, kept):
            return {"rope_type": "default", "rope_theta": rope.theta ** (kept / count)}
        if count % kept == 0 and tuple(frequencies) == strided(count, kept):
            return {"rope_type": "default", "rope_theta": rope.theta}
    there = FREQUENCIES[rope.kind](rope)[0].double()[torch.tensor(frequencies)]
    plain = rope.theta ** (torch.arange(kept, dtype=torch.float64) / kept)
    factors = (1 / (there * plain)).tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": rope.theta,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }
