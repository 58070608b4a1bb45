"""A share is one of the recipe's source, whatever the stages before have left of it."""

from typing import Any

import pytest

from compress.errors import RecipeError
from compress.plan.plan import Plan
from compress.verbs import make_plan
from helpers.short_runs import SELF, recipe

KEPT = {"num_hidden_layers": 5, "num_key_value_heads": 4}  # beside hidden 64, 4 heads, FFN 96


def planned(tiny: Any, *stages: dict[str, Any]) -> Plan:
    return make_plan(recipe(*stages, calibration=SELF), tiny("mistral", **KEPT))


def width(**options: Any) -> dict[str, Any]:
    return {"method": "prune_width", **options}


def depth(**options: Any) -> dict[str, Any]:
    return {"method": "prune_depth", **options}


def prune(**options: Any) -> dict[str, Any]:
    return {"method": "prune", **options}


GQA = {"method": "gqa", "pool": "mean"}


@pytest.mark.parametrize(
    ("before", "by_share", "by_count"),
    [
        (width(ffn=72), width(ffn=0.5), width(ffn=48)),
        (width(ffn=72), width(ffn=0.5, multiple_of=32), width(ffn=32)),
        (width(heads=3), width(heads=0.5), width(heads=2)),
        ({**GQA, "groups": 2}, width(heads=0.75), width(heads=2)),
        (width(heads=3), {**GQA, "groups": 0.25}, {**GQA, "groups": 1}),
        (width(hidden=48), width(hidden=0.5), width(hidden=32)),
        (depth(layers=4), depth(layers=0.6), depth(layers=3)),
        (depth(layers=4), prune(sizes={"ffn": 0.25}), prune(sizes={"ffn": 24})),
    ],
    ids=range(8),
)
def test_a_share_is_one_of_the_source_behind_other_stages(
    tiny, before: dict[str, Any], by_share: dict[str, Any], by_count: dict[str, Any]
) -> None:
    shared, counted = (planned(tiny, before, x).edits[-1] for x in (by_share, by_count))
    assert shared.result.config == counted.result.config
    assert shared.result.entries == counted.result.entries
    assert shared.result.config != shared.source.config
    assert shared.stage is not None
    assert counted.stage is not None
    assert shared.stage.describe() == counted.stage.describe().replace(
        "ffn 32", "ffn 32, multiple_of 32"
    )


@pytest.mark.parametrize("measure", ["params", "bytes", "kv_bytes_per_token"])
def test_a_budget_is_a_share_of_the_source_too(tiny, measure: str) -> None:
    before = width(ffn=72, heads=3)
    whole = planned(tiny, depth(layers=1.0))
    takes = {
        "params": whole.source.params,
        "bytes": whole.source.file_bytes,
        "kv_bytes_per_token": whole.kv_bytes_per_token[0],
    }[measure]
    found = []
    for amount in (0.6, int(0.6 * takes + 1e-9)):
        space = planned(tiny, before, prune(budget={measure: amount})).edits[-1].space
        assert space is not None
        found.append((space.limit, space.points))
    assert found[0] == found[1]
    assert found[0][0] == int(0.6 * takes + 1e-9)


@pytest.mark.parametrize(
    ("before", "stage", "line"),
    [
        (
            width(ffn=72),
            width(ffn=0.9),
            "ffn: is 0.9, 86 of the source's 96, and the model that the stage reads has 72; give a",
        ),
        (
            depth(layers=3),
            depth(layers=0.8),
            "is 0.8, 4 of the source's 5, and the model that the stage reads has 3; give a share",
        ),
        (
            width(ffn=72),
            width(ffn=80),
            "ffn: is 80; the source has 96, and the model that the stage reads 72; give 1 to 72",
        ),
        (
            width(heads=2),
            {**GQA, "groups": 0.5},
            "stages[1].groups: is 2, and the model has 2 heads of keys and values; give fewer",
        ),
        (
            width(heads=2),
            prune(budget={"kv_bytes_per_token": 0.8}),
            "(1024 bytes), and the source has 1.28 kB (1280 bytes), the model that the stage reads",
        ),
    ],
    ids=range(5),
)
def test_a_share_above_what_the_stage_reads_is_refused(
    tiny, before: dict[str, Any], stage: dict[str, Any], line: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        planned(tiny, before, stage)
    assert line in str(caught.value)
    assert "stages[1]." in str(caught.value)
