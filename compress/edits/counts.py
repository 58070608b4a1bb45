"""How many of something stay, as recipes say it."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from compress.checkpoint.outline import Outline
from compress.errors import RecipeError

Amount = int | float  # a count, or with a point a share of what the recipe's source has


@runtime_checkable
class HasShares(Protocol):
    """Options of an edit that may be shares of what the recipe's source has."""

    def counted(self, source: Outline, model: Outline) -> Any:
        """The same options with counts. source: the recipe's. model: the one that the stage reads.

        RecipeError for more than the model has, and for none; CheckpointError for a decoder in no
        table.
        """


def with_counts(config: Any, source: Outline, model: Outline) -> Any:
    """Options with counts in place of shares; arguments and errors as of `HasShares`."""
    return config.counted(source, model) if isinstance(config, HasShares) else config


def listed(noun: str, indices: Sequence[int]) -> str:
    """ "layer 2", "layers 0, 1 and 4"."""
    assert indices, "there is nothing to list"
    *most, last = map(str, indices)
    return f"{noun}s {', '.join(most)} and {last}" if most else f"{noun} {last}"


def check_amount(name: str, amount: Amount | None) -> None:
    """RecipeError unless it is 1 or more, or a share above 0 and at most 1."""
    if amount is None:
        return
    if isinstance(amount, float):
        if not 0 < amount <= 1:
            raise RecipeError(
                f"{name} is {amount}; a share of the source's is above 0 and at most 1.0, and a"
                " count is a whole number without a point"
            )
    elif isinstance(amount, bool) or amount < 1:
        raise RecipeError(f"{name} is {amount}; 1 or more must stay")


def counted_of(
    name: str, amount: Amount, there: int, multiple: int = 1, *, source: int | None = None
) -> int:
    """How many of `there` stay; RecipeError for more than there are, and for none.

    multiple: what a share is rounded down to a multiple of; a count is taken as it is. source: how
    many the recipe's source has, of which a share is one; None where that is `there`.
    """
    source = there if source is None else source
    count = amount if isinstance(amount, int) else _of_share(name, amount, source, multiple)
    if count <= there:
        return count
    if isinstance(amount, float):
        raise RecipeError(
            f"{name} is {amount}, {count} of the source's {source}, and the model that the stage"
            f" reads has {there}; give a share of {int(1000 * there / source) / 1000:g} or less"
        )
    cut = f", and the model that the stage reads {there}" if source != there else ""
    raise RecipeError(f"{name} is {amount}; the source has {source}{cut}; give 1 to {there}")


def _of_share(name: str, share: float, source: int, multiple: int) -> int:
    if share == 1.0:
        return source
    count = int(share * source + 1e-9) // multiple * multiple
    if not count:
        raise RecipeError(
            f"{name} is {share}: of the source's {source} that is less than {multiple}; give a"
            " larger share"
        )
    return count
