"""Patterns of layers as a recipe writes them; compress.recipe.matching says what they mean."""

import re

from compress.recipe.reader import read
from compress.recipe.tree import Node, problem


def read_patterns(node: Node) -> tuple[str, ...]:
    """A list of globs and "re:" with a regular expression; RecipeError for one that is neither."""
    patterns: tuple[str, ...] = read(tuple[str, ...], node)
    assert isinstance(node.content, tuple)
    for pattern, item in zip(patterns, node.content, strict=True):
        if not pattern:
            raise problem(item, "is empty; a pattern is a glob or 're:' and a regular expression")
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise problem(item, f"{pattern!r} is not a regular expression: {error}") from None
    return patterns
