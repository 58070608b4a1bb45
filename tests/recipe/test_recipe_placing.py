"""Errors of code that knows no recipe get the place of the key that they are about."""

from dataclasses import replace

import pytest

from compress.errors import CompressError, DataError, RecipeError
from compress.recipe import Places, Recipe
from compress.recipe.placing import placed
from compress.recipe.reading.parse import parse

TEXT = """name: x
stages:
  - {method: rtn, scheme: W4A16}
kv_cache: fp8
calibration: {sources: self}
evaluation:
  texts: [self]
  window: 64
output:
  format: gptq
"""


def said(recipe: Recipe, key: str, error: CompressError) -> str:
    with pytest.raises(type(error)) as caught, placed(recipe, key):
        raise error
    return str(caught.value)


def test_the_place_of_the_key_that_is_spoken_of() -> None:
    recipe = parse(TEXT, label="r.yaml")
    for key, error, line in (
        ("evaluation", RecipeError("evaluation: window is 64; no"), "8: evaluation.window: is 64;"),
        ("evaluation", RecipeError("evaluation: stride is 9; no"), "6: evaluation: stride is 9;"),
        ("output.format", RecipeError("q has 7 bits"), "10: output.format: q has 7 bits"),
        ("output.format", RecipeError("kv_cache: no word for it"), "4: kv_cache: no word for it"),
        ("evaluation.texts[0]", DataError("a.txt: gone"), "7: evaluation.texts[0]: a.txt: gone"),
    ):
        assert said(recipe, key, error).startswith(f"r.yaml:{line}")


def test_a_recipe_without_places_has_the_key() -> None:
    recipe = replace(parse(TEXT), places=Places())
    assert said(recipe, "output.format", RecipeError("no")) == "output.format: no"


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), placed(parse(TEXT), "output"):
        raise ZeroDivisionError
