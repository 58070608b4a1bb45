"""`key: null` takes out every section that may be left out: found by walking the recipe's types."""

import copy
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import yaml

from compress.errors import RecipeError
from compress.recipe import Recipe
from compress.recipe.reading.parse import parse

# Has every section; a new one is to be added here.
FULL: dict[str, Any] = {
    "name": "full",
    "stages": [
        {
            "method": "gptq",
            "scheme": {"bits": 8, "granularity": "channel", "activation": {"bits": 8}},
            "targets": ["q_proj"],
            "ignore": ["k_proj"],
            "overrides": [{"targets": ["q_proj"], "scheme": "W8A16", "damping": 0.02}],
        },
        {
            "method": "rtn",
            "targets": ["o_proj"],
            "candidates": [{"bits": 4, "group_size": 32, "activation": None}, "W8A16"],
            "target": {"bits_per_weight": 5},
        },
    ],
    "calibration": {"sources": [{"text": "a.txt"}]},
    "evaluation": {
        "texts": [{"text": "b.txt"}],
        "tasks": [{"path": "c.jsonl", "stop": ["."]}],
        "samples": {"prompts": ["Once"], "tokens": 9},
    },
    "output": {"format": "auto"},
    "kv_cache": "fp8",
    "export": ["gguf"],
}
# History, or of another name in a recipe: the claims of a Stage are its `overrides`.
UNWRITTEN = {"text", "overrides", "places", "within", "claims", "config", "edits", "tuning"}
# What the types do not say: `claims`; a word that takes a part out; what Stage always has.
UNTYPED = {"stages[].overrides", "stages[].overrides[].scheme", "kv_cache", "stages[].scheme"}


def sections(hint: Any, path: str = "") -> Iterator[str]:
    """Key paths, without positions, of what a mapping or a list fills and may be left out."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] or [hint]
    for kind in kinds if get_origin(hint) is not tuple else []:
        if get_origin(kind) is tuple:
            yield from sections(kind, path)
        elif is_dataclass(kind) and isinstance(kind, type):
            for item in fields(kind):
                own = get_type_hints(kind)[item.name]
                key = f"{path}.{item.name}".removeprefix(".")
                if item.name in UNWRITTEN or not holds_several(own):
                    continue
                if item.default is not MISSING or item.default_factory is not MISSING:
                    yield key
                yield from sections(own, key)
    if get_origin(hint) is tuple:
        yield from sections(get_args(hint)[0], f"{path}[]")


def holds_several(hint: Any) -> bool:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if get_origin(hint) is tuple or is_dataclass(hint):
        return True
    return bool(kinds) and all(map(holds_several, kinds))


def places(value: Any, path: str = "") -> Iterator[str]:
    """Every key path of a recipe."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}.{key}".removeprefix(".")
            yield from places(inner, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from places(inner, f"{path}[{at}]")


SECTIONS = {*sections(Recipe), *UNTYPED}
PLACES = [place for place in places(FULL) if re.sub(r"\d+", "", place) in SECTIONS]


def outcome(recipe: dict[str, Any], *overrides: str) -> Recipe | str:
    """The recipe, or what is wrong with it without the file or option that it is in."""
    try:
        return parse(yaml.safe_dump(recipe), overrides=overrides)
    except RecipeError as error:
        return re.sub(r"^(recipe:\d+|--set \S+): ", "", str(error))


def holder_of(recipe: dict[str, Any], place: str) -> tuple[dict[str, Any], str]:
    """The mapping that a key is in, and the key."""
    *steps, key = re.findall(r"\w+", place)
    inner: Any = recipe
    for step in steps:
        inner = inner[int(step) if step.isdecimal() else step]
    return inner, key


def test_every_section_is_tried() -> None:
    assert isinstance(outcome(FULL), Recipe)
    tried = {re.sub(r"\d+", "", place) for place in PLACES}
    assert {"evaluation.samples", "evaluation.tasks[].stop", "stages[].target"} < tried
    assert tried == SECTIONS


@pytest.mark.parametrize("place", PLACES)
def test_null_is_as_if_the_key_was_not_there(place: str) -> None:
    """The same recipe or the same refusal, on a command line and in a file."""
    null, without = copy.deepcopy(FULL), copy.deepcopy(FULL)
    holder, key = holder_of(null, place)
    holder[key] = None
    holder, key = holder_of(without, place)
    del holder[key]
    assert outcome(FULL, f"{place}=null") == outcome(null) == outcome(without)


@pytest.mark.parametrize("place", ["name", "stages", "calibration.sources", "seed"])
def test_null_is_no_value_of_anything_else(place: str) -> None:
    found = outcome(FULL, f"{place}=null")
    assert isinstance(found, str)
    assert found.startswith(f"{place}: is empty; it takes ")
