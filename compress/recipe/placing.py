"""Places for errors of code that knows no recipe."""

from collections.abc import Iterator
from contextlib import contextmanager

from compress.errors import CompressError
from compress.recipe.schema import Recipe


@contextmanager
def placed(recipe: Recipe, key: str) -> Iterator[None]:
    """Puts "file.yaml:12: key" in front of a CompressError that is raised inside.

    A message that names a key below `key` itself ("window is 600" at "evaluation") gets that key's
    place; one that begins with a section of the recipe ("kv_cache: ...") that section's.
    """
    try:
        yield
    except CompressError as error:
        words = str(error).removeprefix(f"{key}: ")
        first = words.partition(" ")[0]
        if first == "kv_cache:":
            key, words = "kv_cache", words.partition(" ")[2]
        elif f"{key}.{first}" in recipe.places.table:
            key = f"{key}.{first}"
            words = words.partition(" ")[2]
        raise type(error)(f"{recipe.at(key)}: {words}") from error
