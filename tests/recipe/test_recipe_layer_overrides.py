"""Overrides of a stage: what each layer gets, what a dump keeps, and every refusal."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.arch.spec import LinearSpec
from compress.errors import RecipeError
from compress.quant.scheme import PRESETS, QuantScheme
from compress.recipe import Recipe, dump
from compress.recipe.matching import Assignment, assign, scaled_as
from compress.recipe.reading.parse import parse


def linear(name: str, role: str) -> LinearSpec:
    return LinearSpec(name, f"{name}.weight", (8, 8), role, role, name)


LINEARS = [
    linear(f"model.layers.{i}.{part}", role)
    for i in range(3)
    for part, role in (
        ("self_attn.q_proj", "q"),
        ("self_attn.o_proj", "o"),
        ("mlp.gate", "router"),
        ("mlp.up_proj", "up"),
        ("mlp.down_proj", "down"),
    )
] + [linear("lm_head", "head")]
RTN = {"method": "rtn", "scheme": "W4A16", "group_size": 32}
EIGHT_DOWN = {"targets": ["down_proj"], "bits": 8}
SKIP_FIRST = {"targets": ["layers.0.*"], "skip": True}


def recipe(*stages: dict[str, Any], set_values: tuple[str, ...] = ()) -> Recipe:
    needing = any(s["method"] in ("gptq", "awq", "smoothquant") or "target" in s for s in stages)
    data = {"name": "x", "stages": list(stages)}
    if needing:
        data["calibration"] = {"sources": "self"}
    text = yaml.safe_dump(data, sort_keys=False)
    return parse(text, label="r.yaml", overrides=set_values)


def overridden(*overrides: dict[str, Any], **stage: Any) -> Recipe:
    return recipe({**RTN, **stage, "overrides": list(overrides)})


def shared_out(asked: Recipe) -> Assignment:
    return assign(asked.stages, LINEARS)


def schemes(asked: Recipe) -> dict[str, str]:
    """By layer name; a layer that stays has its reason."""
    found = shared_out(asked)
    given = {name: asked.stages[i].scheme.describe() for name, i in found.stage_of.items()}
    return {x.name: given.get(x.name) or found.reason_of[x.name] for x in LINEARS}


def refusal(asked: Recipe) -> str:
    with pytest.raises(RecipeError) as caught:
        shared_out(asked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_override_changes_what_it_names() -> None:
    asked = overridden(EIGHT_DOWN, {"targets": ["o_proj"], "scale_search": "minmax"})
    base, down, o_proj = asked.stages
    assert base.scheme == QuantScheme(4, True, "group", 32)
    assert down.scheme == QuantScheme(8, True, "group", 32)
    assert down.config == base.config
    assert o_proj.scheme == base.scheme
    assert (base.config.scale_search, o_proj.config.scale_search) == ("mse", "minmax")
    assert [stage.index for stage in asked.stages] == [0, 1, 2]
    assert [stage.label for stage in asked.stages] == [
        "stages[0]",
        "stages[0].overrides[0]",
        "stages[0].overrides[1]",
    ]


@pytest.mark.parametrize(
    ("change", "scheme"),
    [
        ({"bits": 8}, QuantScheme(8, True, "group", 32)),
        ({"symmetric": False}, QuantScheme(4, False, "group", 32)),
        ({"group_size": 8}, QuantScheme(4, True, "group", 8)),
        ({"granularity": "channel"}, QuantScheme(4, True, "channel", 0)),
        ({"bits": 3, "granularity": "tensor"}, QuantScheme(3, True, "tensor", 0)),
        ({"scheme": "W8A16"}, PRESETS["W8A16"]),
        ({"scheme": "W8A16", "group_size": 64}, QuantScheme(8, True, "group", 64)),
        ({"scheme": {"bits": 5}}, QuantScheme(5, True, "group", 128)),
    ],
)
def test_schemes_of_overrides(change: dict[str, Any], scheme: QuantScheme) -> None:
    asked = overridden({"targets": ["down_proj"], **change})
    assert asked.stages[1].scheme == scheme
    assert parse(dump(asked)) == asked


def test_groups_over_a_stage_with_one_scale_a_row() -> None:
    (_, down) = recipe(
        {
            "method": "rtn",
            "scheme": "W8A16",
            "overrides": [{"targets": ["down_proj"], "granularity": "group"}],
        }
    ).stages
    assert down.scheme == QuantScheme(8, True, "group", 128)


def test_later_overrides_win_and_the_stage_keeps_the_rest() -> None:
    found = schemes(overridden({"targets": ["mlp.*"], "bits": 3}, EIGHT_DOWN, SKIP_FIRST))
    assert found["model.layers.1.self_attn.q_proj"] == "int4 sym g32"
    assert found["model.layers.1.mlp.up_proj"] == "int3 sym g32"
    assert found["model.layers.1.mlp.down_proj"] == "int8 sym g32"
    first = "skipped by 'layers.0.*' in stages[0].overrides[2].targets"
    assert {v for k, v in found.items() if ".0." in k and "gate" not in k} == {first}
    ignored = "ignored by 'router' in stages[0].ignore"
    assert {v for k, v in found.items() if k.endswith(".gate")} == {ignored}


def test_an_override_behind_one_that_skips_takes_layers_back() -> None:
    found = schemes(overridden(SKIP_FIRST, EIGHT_DOWN))
    assert found["model.layers.0.mlp.down_proj"] == "int8 sym g32"
    assert found["model.layers.0.mlp.up_proj"].startswith("skipped by 'layers.0.*'")


def test_only_the_stage_s_own_layers_count() -> None:
    asked = overridden({"targets": ["layers.1.*"], "bits": 8}, targets=["mlp.*"])
    found = schemes(asked)
    assert found["model.layers.1.mlp.up_proj"] == "int8 sym g32"
    assert found["model.layers.2.mlp.up_proj"] == "int4 sym g32"
    assert found["model.layers.1.self_attn.q_proj"] == "no stage targets it"
    outside = overridden({"targets": ["self_attn.*"], "bits": 8}, targets=["mlp.*"])
    assert refusal(outside) == (
        "r.yaml:9: stages[0].overrides[0].targets: none of the 6 layers it names is among the"
        " targets of stages[0] ('mlp.*'); add it there"
    )


def test_who_names_the_head_or_the_routers_means_them() -> None:
    found = schemes(overridden({"targets": ["lm_head"], "bits": 8}))
    assert found["lm_head"] == "int8 sym g32"
    assert found["model.layers.0.mlp.gate"].startswith("ignored by 'router'")
    found = schemes(
        overridden(
            {"targets": ["lm_head"], "bits": 8},
            {"targets": ["*_*"], "bits": 3},
            targets=["*_*", "router"],
            ignore=["lm_head"],
        )
    )
    assert found["lm_head"] == "int8 sym g32", "a later glob still leaves the head alone"
    found = schemes(overridden({"targets": ["router"], "scheme": "W8A16"}))
    assert found["model.layers.0.mlp.gate"] == "int8 sym channel"
    found = schemes(overridden({"targets": ["lm_head"], "skip": True}, ignore=[]))
    assert found["lm_head"] == "skipped by 'lm_head' in stages[0].overrides[0].targets"


def test_layers_that_none_gets() -> None:
    assert refusal(overridden({"targets": ["down_prj"], "bits": 8})) == (
        "r.yaml:8: stages[0].overrides[0].targets[0]: 'down_prj' matches no layer; close ones:"
        " down_proj, o_proj"
    )
    skipping = {"targets": ["layers.7.*"], "skip": True}
    assert refusal(overridden(EIGHT_DOWN, skipping)).startswith(
        "r.yaml:11: stages[0].overrides[1].targets[0]: 'layers.7.*' matches no layer;"
    )
    assert refusal(overridden(EIGHT_DOWN, {"targets": ["mlp.down*"], "bits": 3})) == (
        "r.yaml:7: stages[0].overrides[0].targets: all 3 of its layers are taken by later"
        " overrides, which win; take one of them out"
    )
    assert refusal(overridden(SKIP_FIRST, {"targets": ["*"], "bits": 3})).startswith(
        "r.yaml:3: stages[0].targets: all 12 of its layers are taken by its overrides;"
    )
    assert refusal(
        overridden(SKIP_FIRST, {"targets": ["*"], "bits": 3}, targets=["layers.0.*", "lm_head"])
    ).startswith("r.yaml:6: stages[0].targets: all 5 of its layers")
    assert refusal(overridden({"targets": ["gate"], "bits": 8})) == (
        "r.yaml:7: stages[0].overrides[0].targets: all 3 layers it names are in this stage's"
        " ignore ('lm_head', 'router'); set ignore to what it should leave"
    )


def test_a_skip_that_later_overrides_take_whole() -> None:
    assert refusal(overridden(SKIP_FIRST, {"targets": ["re:.*\\.[01]\\..*"], "bits": 3})) == (
        "r.yaml:7: stages[0].overrides[0].targets: all 4 of its layers are taken by later"
        " overrides, which win; take one of them out"
    )


def test_another_stage_is_named_by_its_place_in_the_recipe() -> None:
    asked = recipe({**RTN, "overrides": [EIGHT_DOWN]}, {**RTN, "targets": ["down_proj"]})
    assert refusal(asked) == (
        "r.yaml:13: stages[1].targets: model.layers.0.mlp.down_proj already belongs to"
        " stages[0].overrides[0]; add it to the ignore of one of the two"
    )


REFUSALS = [
    ({"bits": 8}, ": required key 'targets' is missing; it takes a list of patterns of the layers"),
    ({"targets": ["q"]}, ": changes nothing; give what is different, or skip: true"),
    ({"targets": ["q"], "skip": False}, ": changes nothing; give what is different, or skip: true"),
    ({"targets": [], "bits": 8}, ".targets: is empty; name the layers that the override is for"),
    ({"targets": ["re:("], "bits": 8}, ".targets[0]: 're:(' is not a regular expression: missing"),
    ({"targets": ["q"], "skip": 1}, ".skip: is '1'; it takes true or false"),
    (
        {"targets": ["q"], "skip": True, "bits": 8},
        ".bits: does nothing beside skip: true; give one of the two",
    ),
    ({"targets": ["q"], "bits": 9}, ".bits: bits is 9; weights take 2 to 8 bits"),
    (
        {"targets": ["q"], "granularity": "channel", "group_size": 64},
        ".group_size: group_size is 64 with granularity 'channel'; leave it out",
    ),
    (
        {"targets": ["q"], "scheme": "W8A16", "bits": 4},
        ".bits: goes without scheme, which says it; give one of the two",
    ),
    ({"targets": ["q"], "scheme": "W8A61"}, ".scheme: unknown scheme 'W8A61'; allowed: "),
    (
        {"targets": ["q"], "scheme": "FP8_DYNAMIC"},
        (
            ".scheme: is fp8 channel a-fp8, but rtn rounds to integers, and an override keeps the"
            " method of its stage; write skip: true in its place and add a stage {method: fp8,"
            " scheme: FP8_DYNAMIC, targets: ['q']}"
        ),
    ),
    (
        {"targets": ["q"], "bit": 8},
        (
            ".bit: unknown key 'bit'; allowed: targets, skip, scheme, bits, symmetric, granularity,"
            " group_size, scale_search, signs; did you mean 'bits'?"
        ),
    ),
    ({"targets": ["q"], "method": "gptq"}, ".method: unknown key 'method'; allowed: targets,"),
    ({"targets": ["q"], "scale_search": "mes"}, ".scale_search: is 'mes'; allowed: minmax, mse,"),
    (
        {"targets": ["q"], "scale_search": "importance"},
        ": 'rtn' needs calibration data; add 'calibration: {sources: self}' or name your own texts",
    ),
]


@pytest.mark.parametrize(("override", "message"), REFUSALS)
def test_a_mistake_has_the_place_of_the_override(override: dict[str, Any], message: str) -> None:
    line = yaml.safe_dump(override, default_flow_style=True, width=1000).strip()
    text = (
        "name: x\nstages:\n  - method: rtn\n    scheme: W4A16\n    overrides:\n"
        f"      - {{targets: [a], bits: 8}}\n      - {line}\n"
    )
    with pytest.raises(RecipeError) as caught:
        parse(text, label="file.yaml")
    assert str(caught.value).startswith(f"file.yaml:7: stages[0].overrides[1]{message}")
    assert "\n" not in str(caught.value)


def test_overrides_that_are_no_list() -> None:
    with pytest.raises(RecipeError) as caught:
        recipe({**RTN, "overrides": EIGHT_DOWN})
    assert str(caught.value).startswith(
        "r.yaml:6: stages[0].overrides: is a mapping; it takes a list of mappings"
    )


def test_values_from_the_command_line() -> None:
    stage = {**RTN, "overrides": [EIGHT_DOWN, SKIP_FIRST]}
    asked = recipe(stage, set_values=("stages[0].overrides[0].bits=6",))
    assert asked.stages[1].scheme == QuantScheme(6, True, "group", 32)
    key = "stages[0].overrides[0].group_size"
    asked = recipe(stage, set_values=(f"{key}=16",))
    assert asked.stages[1].scheme == QuantScheme(8, True, "group", 16)
    assert asked.stages[1].at("group_size") == f"--set {key}=16: {key}"
    with pytest.raises(RecipeError, match=r"overrides\[0\].bits: bits is 9; weights take 2 to 8"):
        recipe(stage, set_values=("stages.0.overrides.0.bits=9",))
    assert recipe(stage, set_values=("stages[0].overrides=null",)) == recipe(RTN)
    assert recipe(stage, set_values=("stages[0].overrides=[]",)) == recipe(RTN)


def test_what_an_override_empties_stays_empty_in_a_dump(tmp_path: Path) -> None:
    stage = {"method": "gptq", "scheme": "W4A16", "act_order": "static", "damping": 0.02}
    asked = recipe({**stage, "overrides": [{"targets": ["down_proj"], "act_order": "none"}]})
    again = parse(dump(asked))
    assert again == asked
    assert (again.stages[1].config.act_order, again.stages[1].config.damping) == ("none", 0.02)
    assert [stage.label for stage in again.stages] == [stage.label for stage in asked.stages]


def test_candidates_and_overrides() -> None:
    stage = {
        "method": "gptq",
        "candidates": ["W3A16", "W4A16"],
        "target": {"bits_per_weight": 3.5},
    }
    asked = recipe(
        {**stage, "overrides": [{"targets": ["down_proj"], "scheme": "W8A16"}, SKIP_FIRST]}
    )
    assert (asked.stages[0].scheme, asked.stages[1].scheme) == (None, PRESETS["W8A16"])
    assert (asked.stages[1].candidates, asked.stages[1].target) == ((), None)
    assert parse(dump(asked)) == asked
    for change, message in (
        ({"damping": 0.1}, ": has no scheme, and its layers are none of those the stage's target"),
        ({"bits": 8}, ".bits: changes the stage's scheme, which it does not have; give the"),
        ({"candidates": ["W4A16"]}, ".candidates: unknown key 'candidates'; allowed: targets,"),
    ):
        with pytest.raises(RecipeError) as caught:
            recipe({**stage, "overrides": [{"targets": ["down_proj"], **change}]})
        assert f"stages[0].overrides[0]{message}" in str(caught.value)


def test_scaling_in_front_of_overrides() -> None:
    gptq = {"method": "gptq", "scheme": "W4A16", "overrides": [EIGHT_DOWN, SKIP_FIRST]}
    found = shared_out(recipe({"method": "awq"}, gptq))
    assert found.stage_of["model.layers.1.mlp.down_proj"] == 2
    assert found.folds_of["model.layers.1.mlp.down_proj"] == (0,)
    assert "model.layers.0.mlp.down_proj" not in found.folds_of, "what is skipped is not scaled"
    assert found.reason_of["model.layers.0.mlp.up_proj"] == (
        "skipped by 'layers.0.*' in stages[1].overrides[1].targets"
    )


def test_a_skip_of_the_scaling_stage_leaves_the_rounding() -> None:
    scaling = {"method": "awq", "overrides": [SKIP_FIRST]}
    found = shared_out(recipe(scaling, {"method": "gptq", "scheme": "W4A16"}))
    assert found.stage_of["model.layers.0.mlp.up_proj"] == 1
    assert "model.layers.0.mlp.up_proj" not in found.folds_of
    assert found.folds_of["model.layers.1.mlp.up_proj"] == (0,)


def test_an_override_of_the_scheme_alone_is_scaled_with_its_stage() -> None:
    finer = {"targets": ["o_proj"], "grid": 40, "bits": 8}
    asked = recipe({"method": "awq", "scheme": "W4A16", "overrides": [EIGHT_DOWN, finer]})
    assert [scaled_as(asked.stages, i) for i in range(3)] == [0, 0, 2]
    found = shared_out(asked)
    assert found.stage_of["model.layers.0.mlp.down_proj"] == 1
    assert found.folds_of["model.layers.0.mlp.down_proj"] == (0,)
    assert found.folds_of["model.layers.0.self_attn.o_proj"] == (2,)


def test_a_scaling_stage_that_means_another_scheme_than_an_override() -> None:
    scaling = {"method": "awq", "scheme": "W4A16"}
    asked = recipe(scaling, {"method": "gptq", "scheme": "W4A16", "overrides": [EIGHT_DOWN]})
    assert refusal(asked) == (
        "r.yaml:4: stages[0].scheme: is another one than that of stages[1].overrides[0] (gptq),"
        " which rounds model.layers.0.mlp.down_proj; leave it out here"
    )


PATTERNS = ["*_proj", "down_proj", "layers.0.*", "layers.1.mlp.*", "re:.*[qo]_proj", "lm_head"]
any_override = st.tuples(
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2, unique=True),
    st.one_of(st.none(), st.sampled_from([3, 5, 6, 8])),
)


@given(st.lists(any_override, max_size=4), st.sampled_from([("*",), ("mlp.*",), ("layers.0.*",)]))
@settings(max_examples=60, deadline=None)
def test_the_last_override_that_names_a_layer_has_it(
    overrides: list[tuple[list[str], int | None]], targets: tuple[str, ...]
) -> None:
    """Against a plain reading: the stages are asked layer by layer."""
    from compress.recipe.reading.patterns import meaning

    written = [
        {"targets": t, "skip": True} if bits is None else {"targets": t, "bits": bits}
        for t, bits in overrides
    ]
    asked = overridden(*written, targets=list(targets))
    assert parse(dump(asked)) == asked
    try:
        found = schemes(asked)
    except RecipeError:
        return
    for x in LINEARS:
        bits: int | None = None
        if any(meaning(p, "")(x) for p in targets):
            bits = None if x.role in ("router", "head") else 4
            for patterns, own in overrides:
                named = any(meaning(p, "")(x) for p in patterns)
                if named and (x.role != "router" and (x.role != "head" or "lm_head" in patterns)):
                    bits = own
        if bits is None:
            assert "int" not in found[x.name]
        else:
            assert found[x.name].startswith(f"int{bits} ")
