"""report.json: strict, lossless, the same bytes every time."""

import json
import math
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import OutputError
from compress.report.codec import from_json, read_json, to_json, write_json
from compress.report.records.quality import Quality, TaskNumber, TaskQuality, TextQuality
from compress.report.schema import Layer, Planned, Report, Sample, StageRecord, StockLoad

NUMBERS = st.floats(allow_nan=False)
WORDS = st.text(st.characters(), max_size=12)
FREE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
OBJECTS = st.dictionaries(WORDS, FREE, max_size=3)


def tuples(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


LAYERS = st.builds(
    Layer,
    bits_per_weight=NUMBERS,
    error=st.none() | NUMBERS,
    damping=st.none() | NUMBERS,
)
STAGES = st.builds(StageRecord, seconds=NUMBERS, layers=tuples(LAYERS))
TEXTS = st.builds(
    TextQuality,
    ppl_source=st.none() | NUMBERS,
    ppl_result=NUMBERS,
    kl=st.none() | NUMBERS,
    top1_agreement=st.none() | NUMBERS,
    settings=OBJECTS,
)

TASKS = st.builds(
    TaskQuality,
    numbers=st.dictionaries(
        WORDS,
        st.builds(
            TaskNumber,
            result=NUMBERS,
            result_error=st.none() | NUMBERS,
            source=st.none() | NUMBERS,
            source_error=st.none() | NUMBERS,
            difference_error=st.none() | NUMBERS,
        ),
        max_size=3,
    ),
    same_answers=st.none() | NUMBERS,
    settings=OBJECTS,
)
ALL_TASKS = st.dictionaries(WORDS, TASKS, max_size=3)


@settings(deadline=None)  # it writes and reads a file, beside others' work
@given(
    stages=tuples(STAGES),
    quality=st.none() | st.builds(Quality, texts=tuples(TEXTS), tasks=ALL_TASKS),
    samples=tuples(st.builds(Sample)),
    loads=st.none() | st.builds(StockLoad, max_logit_error=NUMBERS, detail=tuples(WORDS)),
    calibration=st.none() | OBJECTS,
    two_models=st.none() | st.booleans(),
    warnings=tuples(st.text(st.characters(categories=("Cs", "L", "P")), max_size=5)),
)
def test_round_trip(report: Report, **changes: Any) -> None:
    changed = replace(report, **changes)
    text = to_json(changed)
    assert from_json(text) == changed
    assert to_json(from_json(text)) == text
    text.encode("utf-8")


def test_every_field_is_written(report: Report) -> None:
    def names(value: Any) -> Any:
        if is_dataclass(value):
            return {f.name: names(getattr(value, f.name)) for f in fields(value)}
        if isinstance(value, tuple):
            return [names(item) for item in value]
        return value

    assert json.loads(to_json(report)) == names(report)


def test_free_objects_are_sorted(report: Report) -> None:
    forth = replace(report, calibration={"a": 1, "b": {"x": 1, "y": 2}})
    back = replace(report, calibration={"b": {"y": 2, "x": 1}, "a": 1})
    assert to_json(forth) == to_json(back)


def test_a_diverged_model_still_gives_standard_json(report: Report) -> None:
    text = TextQuality("t", 8, 3.0, math.inf, math.nan, 0.0)
    written = to_json(replace(report, quality=Quality((text,))))

    def refuse(name: str) -> float:
        raise AssertionError(name)

    json.loads(written, parse_constant=refuse)
    found = from_json(written).quality
    assert found is not None
    assert found.texts[0].ppl_result == math.inf
    assert math.isnan(found.texts[0].kl or 0)


def test_a_value_that_json_cannot_hold_is_our_fault(report: Report) -> None:
    with pytest.raises(TypeError, match=r"plain JSON values, not \w*Path"):
        to_json(replace(report, calibration={"path": Path("x")}))


def test_write_and_read(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report" / "report.json"
    write_json(report, path)
    first = path.read_bytes()
    write_json(read_json(path), path)
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir()] == ["report.json"]


def edited(report: Report, **changes: Any) -> str:
    """JSON of the report with top-level keys changed; `...` removes a key."""
    data = {**json.loads(to_json(report)), **changes}
    return json.dumps({key: value for key, value in data.items() if value is not ...})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "report.json: schema is 2, this version reads 1"),
        ({"schema": True}, "schema is True"),
        ({"schema": ...}, "schema is None"),
        ({"sead": 1}, "unknown key 'sead'; allowed here: tool, versions, recipe"),
        ({"seed": ...}, "key 'seed' is missing"),
        ({"seed": "x"}, r'report.json: seed is "x" \(a string\); it must be a whole number'),
        ({"seed": 1.5}, r"seed is 1.5 \(a number\); it must be a whole number"),
        ({"tool": None}, r"tool is null \(null\); it must be a string"),
        ({"stages": {}}, r"stages is {} \(an object\); it must be a list"),
        ({"stages": [3]}, r"stages\[0\] is 3 \(a number\); it must be an object"),
        ({"two_models": 1}, r"two_models is 1 \(a number\); it must be true or false"),
        ({"speed": []}, r"speed is \[\] \(a list\); it must be an object"),
        ({"versions": {"torch": 2}}, r"versions.torch is 2 \(a number\); it must be a string"),
        (
            {"machine": {"cpu": "x", "thread": 2}},
            "unknown key 'machine.thread'; allowed here: cpu, threads",
        ),
    ],
)
def test_refusals_are_one_line(report: Report, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OutputError, match=message) as caught:
        from_json(edited(report, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ('{"schema": NaN}', "NaN is no JSON number"),
        ("[]", "holds a list, not an object"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(OutputError, match=message) as caught:
        read_json(path)
    assert str(caught.value).startswith(str(path))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot read the report: No such file"):
        read_json(tmp_path / "none.json")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(OutputError, match="cannot read the report: not UTF-8 text"):
        read_json(tmp_path / "latin")


def test_a_file_in_the_way_is_named(report: Report, tmp_path: Path) -> None:
    (tmp_path / "report").write_text("a file")
    with pytest.raises(OutputError, match="cannot write the report"):
        write_json(report, tmp_path / "report" / "report.json")


@given(
    planned=st.floats(1e-6, 1e12),
    share=st.floats(-0.99, 10),
)
def test_deviation_is_relative_to_the_plan(planned: float, share: float) -> None:
    found = Planned(planned, planned * (1 + share)).deviation
    assert found == pytest.approx(share, rel=1e-9, abs=1e-9)


def test_deviation_from_a_plan_of_nothing() -> None:
    assert Planned(0, 0).deviation == 0
    assert Planned(0, 3).deviation is None


def test_derived_values(report: Report) -> None:
    assert report.seconds == pytest.approx(30.77)
    assert report.peak_rss_bytes == 702_300_000
    assert report.peak_gpu_bytes is None
    assert len(report.layers) == 43


def test_reports_of_earlier_versions_are_read(report: Report) -> None:
    """A key with a default may be missing: it came later."""
    data = json.loads(to_json(report))
    for stage in data["stages"]:
        del stage["others"]
    del data["budget"], data["loads"], data["two_models"]
    assert from_json(json.dumps(data)) == report
    del data["stages"][0]["seconds"]
    with pytest.raises(OutputError, match=r"key 'stages\[0\].seconds' is missing"):
        from_json(json.dumps(data))
