"""By what keys and values are measured where a latent begins: a row for each way."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from compress.edits.latent.care import care
from compress.edits.latent.evidence import AttentionEvidence
from compress.edits.latent.joint import Started
from compress.edits.latent.rotated import rotated_key
from compress.edits.latent.rotation import Choice
from compress.edits.latent.svd import svd
from compress.edits.latent.transmla import transmla
from compress.edits.repair.ridge import Affine
from compress.errors import RecipeError

Way = Literal["scores", "transmla", "care", "svd"]
FOLDING = ("transmla", "care")  # ways that can take neighbouring frequencies for one


def scores(
    seen: AttentionEvidence, parts: Mapping[str, Affine], frequencies: Sequence[int], fold: int
) -> Started:
    """Keys by the scores that they give, values by what the output of attention makes of them."""
    return Started(seen, rotated_key(seen, frequencies))


# Of what is seen of attention, its "q", "k" and "v", the frequencies of the shared key and how many
# of a head's are folded: what the latent begins with.
STARTS: Mapping[
    str, Callable[[AttentionEvidence, Mapping[str, Affine], Sequence[int], int], Started]
] = MappingProxyType({"scores": scores, "transmla": transmla, "care": care, "svd": svd})


def check_start(way: Way, rope: Choice, freqfold: int) -> None:
    """RecipeError for options that do not go together."""
    if way != "scores" and rope == "any":
        raise RecipeError(f"start is {way}, which chooses no frequencies; take rope: stride")
    if freqfold < 1:
        raise RecipeError(f"freqfold is {freqfold}; it is 1 or more")
    if freqfold > 1 and way not in FOLDING:
        raise RecipeError(
            f"freqfold is {freqfold}, and start: {way} folds no frequencies; take start: transmla"
            " or care"
        )
    if freqfold > 1 and rope != "stride":
        raise RecipeError(
            f"freqfold is {freqfold}, which takes equal steps through the frequencies; take"
            " rope: stride"
        )


def check_fold(freqfold: int, count: int) -> None:
    """RecipeError where the frequencies of a head, `count`, are no multiple of it."""
    if count % freqfold:
        raise RecipeError(
            f"freqfold is {freqfold}, which does not divide the {count} frequencies of a head"
        )
