"""Recipes that name impossible calibration data are refused with the value."""

import subprocess
import sys

import pytest

from compress.errors import RecipeError
from compress_calibration.config import FIELDS_OF_KIND, CalibrationConfig, SourceConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "csv"}, "source kind is 'csv'; it is one of text, jsonl"),
        ({"kind": "text"}, "path is missing; a source of kind 'text' needs it"),
        ({"kind": "hub"}, "id is missing; a source of kind 'hub' needs it"),
        ({"kind": "self", "path": "a"}, "path is 'a', which a source of kind 'self' does not use"),
        (
            {"kind": "text", "path": "a", "split": "x"},
            "split is 'x', which a source of kind 'text'",
        ),
        ({"kind": "jsonl", "path": "a", "separator": "-"}, "separator is '-', which a source"),
        ({"kind": "text", "path": "a", "separator": ""}, "separator is empty"),
        ({"kind": "self", "weight": 0.0}, "weight of a source is 0.0; it is a number above 0"),
        ({"kind": "self", "weight": float("nan")}, "weight of a source is nan"),
    ],
)
def test_a_source_that_cannot_be_is_refused(fields, message):
    with pytest.raises(RecipeError, match=message.replace("(", r"\(")):
        SourceConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sources": ()}, "sources is empty"),
        ({"samples": 0}, "samples is 0; calibration takes 1 row or more"),
        ({"length": 1}, "length is 1; a row holds 2 tokens or more"),
        ({"packing": "cut"}, "packing is 'cut'; it is one of pack, pad"),
        ({"seed": -1}, "seed is -1; it is 0 or more"),
        ({"sources": (SourceConfig("self"), SourceConfig("self"))}, "names 'self' twice"),
    ],
)
def test_a_row_shape_that_cannot_be_is_refused(fields, message):
    with pytest.raises(RecipeError, match=message):
        CalibrationConfig(**{"sources": (SourceConfig("self"),), **fields})


def test_one_path_and_several_are_the_same_to_readers():
    assert SourceConfig("text", path="a").paths == ("a",)
    assert SourceConfig("text", path=("a", "b")).name == "a, b"
    assert SourceConfig("hub", id="owner/name", subset="small").name == "owner/name/small"
    assert set(FIELDS_OF_KIND) == set(SourceConfig.__annotations__["kind"].__args__)


def test_config_does_not_import_torch():
    code = "import sys, compress_calibration.config; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == "False"
