"""How many of something stay, as recipes say it."""

from compress.errors import RecipeError

Amount = int | float  # a count, or with a point a share of what the source has


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


def counted_of(name: str, amount: Amount, there: int, multiple: int = 1) -> int:
    """How many of `there` stay; RecipeError for more than there are, and for none.

    multiple: what a share is rounded down to a multiple of; a count is taken as it is.
    """
    if isinstance(amount, int):
        if amount > there:
            raise RecipeError(f"{name} is {amount}; the source has {there}; give 1 to {there}")
        return amount
    count = int(amount * there + 1e-9) // multiple * multiple
    if amount == 1.0:
        return there
    if not count:
        raise RecipeError(
            f"{name} is {amount}: of the source's {there} that is less than {multiple}; give a"
            " larger share"
        )
    return count
