"""Patterns of layers as a recipe writes them, and what each of them means."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial

from compress.arch.spec import LinearSpec
from compress.errors import RecipeError
from compress.expressions import expression
from compress.recipe.reading.reader import read
from compress.recipe.reading.tree import Node, Scalar, problem
from compress.recipe.schema import Places

Means = Callable[[LinearSpec], bool]
ROLE_OF_WORD: Mapping[str, str] = {
    "lm_head": "head",
    "router": "router",
    "embedding": "embedding",
}


def read_patterns(node: Node) -> tuple[str, ...]:
    """A list of globs and "re:" with a regular expression; RecipeError for one that is neither."""
    if isinstance(node.content, Scalar) and not node.is_null:
        raise problem(node, f"is {node.shown()}; it takes a list of text, {_as_list(node.content)}")
    patterns: tuple[str, ...] = read(tuple[str, ...], node)
    assert isinstance(node.content, tuple)
    for pattern, item in zip(patterns, node.content, strict=True):
        if not pattern:
            raise problem(item, "is empty; a pattern is a glob or 're:' and a regular expression")
        if pattern.startswith("re:"):
            expression(pattern[3:], partial(_no_expression, item, pattern))
    return patterns


def _as_list(given: Scalar) -> str:
    """How one pattern is written as a list; other tools' word for all layers is no pattern."""
    if given.text.casefold() in ("linear", "linears", "all"):
        return "such as [q_proj, down_proj]; left out, it takes all linear layers of the blocks"
    return f"[{given.text}]"


def _no_expression(item: Node, pattern: str, why: str) -> RecipeError:
    return problem(item, f"{pattern!r} {why}")


def meaning(pattern: str, place: str) -> Means:
    """Whether a pattern means a layer, for a look through all of them.

    place: of the pattern, for the RecipeError of a regular expression that takes too long.
    """
    if pattern.startswith("re:"):
        found = expression(pattern[3:], lambda why: RecipeError(f"{place}: {pattern!r} {why}"))
        return lambda linear: found.fullmatch(linear.name)
    role = ROLE_OF_WORD.get(pattern)
    return lambda linear: (
        linear.role == role
        or fnmatchcase(linear.name, pattern)
        or fnmatchcase(linear.name, f"*.{pattern}")
    )


def meanings(patterns: Sequence[str], path: str, places: Places) -> list[tuple[str, Means]]:
    """Each pattern with what it means. path: of their list, "stages[0].targets"."""
    return [(p, meaning(p, places.at(f"{path}[{i}]"))) for i, p in enumerate(patterns)]
