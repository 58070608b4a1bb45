"""The benchmark of structural stages: its recipes are valid, its places are its own."""

import json

import pytest

from benchmarks.quality.tools import slug
from benchmarks.retrofit import points as retrofit
from benchmarks.structure.points import POINTS, SIZES, Point
from benchmarks.structure.run import recipe
from compress.recipe import builtin_names
from compress.recipe.reading.parse import parse

EVERY = (*POINTS, *retrofit.POINTS)
OURS = [point for point in EVERY if not point.peer and not point.recipe]


@pytest.mark.parametrize("point", OURS, ids=lambda point: point.label)
def test_a_point_is_a_valid_recipe(point: Point) -> None:
    parsed = parse(json.dumps(recipe(point, 3)))
    assert parsed.seed == 3
    stages = (*parsed.edits, *parsed.stages, *parsed.tuning)
    assert len(stages) == len(point.stages)


def test_every_point_and_folder_has_a_name_of_its_own() -> None:
    assert len({point.label for point in EVERY}) == len(EVERY)
    assert len({slug(f"{point.group}-{point.name}") for point in EVERY}) == len(EVERY)
    assert {point.recipe for point in POINTS if point.recipe} <= {*builtin_names()}


def test_every_size_is_mended_in_every_way() -> None:
    sizes = [point for point in POINTS if point.group == "sizes"]
    assert len(sizes) == 4 * sum(len(axes) for axes in SIZES.values()) + 2
