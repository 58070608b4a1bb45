"""What a recipe means, and that a dumped one means the same."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.edits.cast import NAMES
from compress.errors import RecipeError
from compress.methods import METHODS
from compress.quant.scheme import PRESETS, ActivationScheme, QuantScheme
from compress.recipe import builtin, builtin_names, dump, load
from compress.recipe.reading.parse import LONGEST_NAME, parse

RTN = "name: x\nstages:\n  - method: rtn\n    scheme: "
GPTQ = "name: x\nstages:\n  - method: gptq\n    scheme: W4A16\ncalibration:\n"
REPO = Path(__file__).resolve().parents[2]


def scheme_of(text: str, *more: str) -> QuantScheme:
    return parse(RTN + text + "\n" + "".join(f"    {m}\n" for m in more)).stages[0].scheme


def test_defaults_are_complete() -> None:
    recipe = parse(RTN + "W4A16\n")
    stage = recipe.stages[0]
    assert (stage.targets, stage.ignore) == (("*",), ("lm_head", "router"))
    assert stage.config == METHODS["rtn"].config(signs="both")
    assert (recipe.seed, recipe.calibration, recipe.evaluation) == (0, None, None)
    assert (recipe.output.format, recipe.output.shard_size) == ("auto", 5 * 10**9)
    assert recipe.text == RTN + "W4A16\n"


@pytest.mark.parametrize("name", PRESETS)
def test_preset_by_name(name: str) -> None:
    scheme = PRESETS[name]
    reason = METHODS["rtn"].why_not(scheme)
    if reason is None and scheme.activation is not None and not scheme.activation.dynamic:
        reason = "needs calibration data"
    if reason is None:
        assert scheme_of(name) == scheme
    else:
        with pytest.raises(RecipeError, match=reason):
            scheme_of(name)


def test_group_and_granularity_follow_each_other() -> None:
    assert scheme_of("W4A16", "group_size: 64") == QuantScheme(4, True, "group", 64)
    assert scheme_of("W8A16", "group_size: 32") == QuantScheme(8, True, "group", 32)
    assert scheme_of("W8A16", "granularity: group") == QuantScheme(8, True, "group", 128)
    assert scheme_of("W4A16", "granularity: channel") == QuantScheme(4, True, "channel", 0)
    assert scheme_of("{bits: 3}") == QuantScheme(3, True, "group", 128)
    assert scheme_of("{granularity: tensor}") == QuantScheme(4, True, "tensor", 0)
    assert scheme_of("{bits: 5}", "group_size: 16") == QuantScheme(5, True, "group", 16)
    full = "{bits: 8, symmetric: false, granularity: channel, activation: {bits: 8}}"
    assert scheme_of(full) == QuantScheme(8, False, "channel", 0, ActivationScheme(8))


def test_method_options_need_no_parser_code() -> None:
    recipe = parse(
        GPTQ.replace("W4A16\n", "W4A16\n    damping: 1e-3\n    act_order: static\n")
        + "  sources: self\n"
    )
    config = recipe.stages[0].config
    assert (config.damping, config.act_order) == (0.001, "static")


def test_sources_in_short_and_long_form(tmp_path: Path) -> None:
    text = GPTQ + (
        "  sources:\n"
        "    - self\n"
        "    - {text: a.txt, weight: 0.5}\n"
        "    - {kind: jsonl, path: [b.jsonl, /c/d.jsonl], field: body}\n"
        "    - {hub: owner/set, split: train}\n"
        "  samples: 8\n"
    )
    calibration = parse(text, folder=tmp_path).calibration
    assert calibration is not None
    own, plain, lines, hub = calibration.sources
    assert own.kind == "self"
    assert (plain.kind, plain.path, plain.weight) == ("text", str(tmp_path / "a.txt"), 0.5)
    assert (lines.path, lines.field) == ((str(tmp_path / "b.jsonl"), "/c/d.jsonl"), "body")
    assert (hub.id, hub.split) == ("owner/set", "train")


def test_seeds_follow_the_recipe_and_self_texts_are_held_out() -> None:
    text = GPTQ + "  sources: self\nevaluation:\n  texts: [self]\n"
    recipe = parse(text, overrides=["seed=7"])
    assert recipe.calibration is not None
    assert recipe.evaluation is not None
    assert recipe.calibration.seed == 7
    assert recipe.evaluation.texts[0].seed == 8
    assert parse(text, overrides=["calibration.seed=3"]).calibration.seed == 3


def test_evaluation_texts_are_named_after_their_files(tmp_path: Path) -> None:
    text = RTN + (
        "W4A16\nevaluation:\n  texts:\n    - {path: tales.txt}\n"
        "    - {jsonl: b.jsonl, name: chats, max_documents: 3}\n    - self\n"
    )
    evaluation = parse(text, folder=tmp_path).evaluation
    assert evaluation is not None
    assert [(t.name, t.kind) for t in evaluation.texts] == [
        ("tales", "text"),
        ("chats", "jsonl"),
        ("self", "self"),
    ]
    assert evaluation.texts[0].path == str(tmp_path / "tales.txt")
    assert evaluation.texts[1].max_documents == 3


def test_a_key_set_to_null_is_a_section_left_out() -> None:
    recipe = parse(RTN + "W4A16\nevaluation: {texts: [self]}\n", overrides=["evaluation=null"])
    assert recipe.evaluation is None


@pytest.mark.parametrize(
    ("written", "size"),
    [("5GB", 5 * 10**9), ("2 GiB", 2**31), ("1.5mb", 1_500_000), ("4096", 4096), ("7B", 7)],
)
def test_shard_sizes(written: str, size: int) -> None:
    recipe = parse(RTN + f"W4A16\noutput: {{shard_size: {written}}}\n")
    assert recipe.output.shard_size == size


def test_overrides_in_both_spellings_and_in_order() -> None:
    overrides = ["stages.0.group_size=64", "stages[0].group_size=32", "output.format=dense"]
    recipe = parse(RTN + "W4A16\n", overrides=overrides)
    assert recipe.stages[0].scheme.group_size == 32
    assert recipe.output.format == "dense"
    assert recipe.overrides == tuple(overrides)
    assert recipe.stages[0].at("group_size") == (
        "--set stages[0].group_size=32: stages[0].group_size"
    )


def test_places_of_values_for_later_messages() -> None:
    recipe = parse(RTN + "W4A16\n    group_size: 8\n", label="a/r.yaml")
    assert recipe.at("stages[0].group_size") == "a/r.yaml:5: stages[0].group_size"
    assert recipe.stages[0].at("scheme") == "a/r.yaml:4: stages[0].scheme"
    assert recipe.stages[0].at("targets[0]") == "a/r.yaml:3: stages[0].targets[0]"
    assert recipe.at("seed") == "a/r.yaml:1: seed"


def test_text_that_looks_like_something_else_stays_text() -> None:
    text = GPTQ + "  sources: [{jsonl: a.jsonl, field: no}]\n"
    calibration = parse(text).calibration
    assert calibration is not None
    assert calibration.sources[0].field == "no"


@pytest.mark.parametrize("name", builtin_names())
def test_built_in_recipes_are_sound_and_survive_a_dump(name: str) -> None:
    recipe = load(name)
    assert recipe.name == name
    assert recipe.description
    again = parse(dump(recipe))
    assert again == recipe
    assert dump(again) == dump(recipe)
    header = builtin(name).text.partition("name:")[0]
    for word in ("For:", "Needs:", "Loads:", "Size:", "On tale-6m:"):
        assert f"# {word}" in header


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1)


edits = st.sampled_from([{"method": "untie"}, *({"method": "cast", "dtype": x} for x in NAMES)])


@st.composite
def recipes(draw: st.DrawFn) -> str:
    import yaml

    bits = draw(st.integers(2, 8))
    stage = {
        "method": "gptq",
        "scheme": {"bits": bits, "symmetric": draw(st.booleans())},
        "targets": draw(st.lists(words.filter(lambda w: not w.startswith("re:")), min_size=1)),
        "damping": draw(st.floats(1e-6, 1.0)),
        "act_order": draw(st.sampled_from(["none", "static", "group"])),
    }
    if draw(st.booleans()):
        stage["scheme"]["granularity"] = draw(st.sampled_from(["channel", "tensor"]))
    else:
        stage["group_size"] = draw(st.integers(1, 4096))
    field = draw(words)
    data = {
        "name": "n" + "".join(draw(words).splitlines())[: LONGEST_NAME - 1],
        "seed": draw(st.integers(0, 2**62)),
        "stages": [*draw(st.lists(edits.map(dict), max_size=2)), stage],
        "calibration": {"sources": [{"jsonl": draw(words), "field": field}, "self"]},
        "evaluation": {"texts": [{"self": True}, {"text": "a/b.txt", "cut": True}]},
        "output": {"shard_size": draw(st.integers(1, 2**40))},
    }
    return yaml.safe_dump(data, allow_unicode=draw(st.booleans()))


@given(recipes())
@settings(max_examples=60, deadline=None)
def test_any_recipe_survives_a_dump(text: str) -> None:
    recipe = parse(text, folder=Path("/texts"))
    again = parse(dump(recipe))
    assert again == recipe
    assert dump(again) == dump(recipe)


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_is_a_recipe_or_one_line(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text)
    assert len(str(caught.value).splitlines()) == 1


def test_texts_of_one_stem_take_their_folders_names() -> None:
    texts = "[{text: a/x.txt}, {text: b/x.txt}, {text: c/y.txt}, {text: d/y.txt, name: mine}]"
    stages = "[{method: rtn, scheme: W8A16}]"
    recipe = parse(f"name: r\nstages: {stages}\nevaluation: {{texts: {texts}}}\n")
    assert recipe.evaluation is not None
    assert [text.name for text in recipe.evaluation.texts] == ["a/x", "b/x", "y", "mine"]
