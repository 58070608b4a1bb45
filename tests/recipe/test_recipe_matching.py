"""Which layers a stage takes, and the patterns that are refused."""

import pytest

from compress.arch.spec import LinearSpec
from compress.errors import RecipeError
from compress.recipe.matching import NO_STAGE, assign, select
from compress.recipe.reading.parse import parse
from compress.recipe.reading.patterns import meaning
from compress.recipe.schema import Stage


def linear(name: str, role: str) -> LinearSpec:
    return LinearSpec(name, f"{name}.weight", (8, 8), role, role, name)


LINEARS = [
    linear(f"model.layers.{i}.{part}", role)
    for i in range(2)
    for part, role in (
        ("self_attn.q_proj", "q"),
        ("self_attn.k_proj", "k"),
        ("mlp.gate", "router"),
        ("mlp.experts.0.down_proj", "down"),
    )
] + [linear("lm_head", "head")]


def stages(*texts: str) -> tuple[Stage, ...]:
    lines = "".join(f"  - {{method: rtn, scheme: W4A16{text}}}\n" for text in texts)
    return parse("name: x\nstages:\n" + lines, label="r.yaml").stages


def refusal(*texts: str) -> str:
    with pytest.raises(RecipeError) as caught:
        assign(stages(*texts), LINEARS)
    return str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("*", 9),
        ("q_proj", 2),
        ("self_attn.*_proj", 4),
        ("model.layers.1.*", 4),
        ("layers.0.mlp.*", 2),
        ("proj", 0),
        ("Q_PROJ", 0),
        ("re:.*[qk]_proj", 4),
        ("re:q_proj", 0),
        ("router", 2),
        ("lm_head", 1),
    ],
)
def test_patterns(pattern: str, count: int) -> None:
    assert sum(meaning(pattern, "")(x) for x in LINEARS) == count


def test_the_head_is_known_by_its_role_too() -> None:
    assert meaning("lm_head", "")(linear("embed_out", "head"))


def test_default_takes_all_linears_but_head_and_routers() -> None:
    found = assign(stages(""), LINEARS)
    assert set(found.stage_of.values()) == {0}
    assert found.reason_of == {
        "lm_head": "ignored by 'lm_head' in stages[0].ignore",
        "model.layers.0.mlp.gate": "ignored by 'router' in stages[0].ignore",
        "model.layers.1.mlp.gate": "ignored by 'router' in stages[0].ignore",
    }


def test_stages_share_the_layers() -> None:
    found = assign(
        stages(", targets: [down_proj]", ", targets: [q_proj]", ", targets: [lm_head], ignore: []"),
        LINEARS,
    )
    assert found.stage_of["model.layers.1.mlp.experts.0.down_proj"] == 0
    assert found.stage_of["model.layers.1.self_attn.q_proj"] == 1
    assert found.stage_of["lm_head"] == 2
    assert found.reason_of["model.layers.0.self_attn.k_proj"] == NO_STAGE


def test_zero_match_target_names_close_layers() -> None:
    assert refusal(", targets: [q_prj]") == (
        "r.yaml:3: stages[0].targets[0]: 'q_prj' matches no layer; close ones:"
        " model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj"
    ).replace("model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj", "q_proj, k_proj")
    assert refusal(", targets: ['*', 'zzz']").startswith(
        "r.yaml:3: stages[0].targets[1]: 'zzz' matches no layer; layers are called, for example,"
    )


@pytest.mark.parametrize(
    ("pattern", "rest"),
    [
        ("q_proj", "self_attn.q_proj and 1 more; write 're:.*q_proj'"),
        ("[qk]_proj|gate", "self_attn.q_proj and 5 more; write 're:.*([qk]_proj|gate)'"),
        ("model.layers.1.*_attn", "self_attn.q_proj and 1 more; write 're:model.layers.1.*_attn.*"),
        ("experts", "mlp.experts.0.down_proj and 1 more; write 're:.*experts.*'"),
        ("(?i)Q_PROJ", "self_attn.q_proj and 1 more; put .* in front, behind or both"),
        ("lm", "a part of lm_head; write 're:lm.*'"),
    ],
)
def test_a_regular_expression_for_a_part_of_a_name(pattern: str, rest: str) -> None:
    found = refusal(f", targets: ['re:{pattern}'], ignore: []")
    front = f"r.yaml:3: stages[0].targets[0]: 're:{pattern}' matches no layer: it must match the"
    assert found.startswith(f"{front} whole name, and matches only a part of ")
    assert rest in found
    assert ("model.layers.1" if "1" in pattern else "model.layers.0") in found or "lm" in pattern
    if "write '" in found:
        longer = found.partition("write '")[2].removesuffix("'")
        assert any(meaning(longer, "")(x) for x in LINEARS)


def test_zero_match_ignore_is_a_mistake_too_but_not_for_the_two_words() -> None:
    assert refusal(", ignore: [down_prj]") == (
        "r.yaml:3: stages[0].ignore[0]: 'down_prj' matches no layer; close ones: down_proj"
    )
    dense = [x for x in LINEARS if x.role in ("q", "k")]
    taken, ignored = select(stages("")[0], dense)
    assert (len(taken), ignored) == (4, {})


def test_a_target_that_is_ignored_altogether() -> None:
    assert refusal(", targets: [lm_head], ignore: [lm_head]") == (
        "r.yaml:3: stages[0].targets: the layer it names is in this stage's ignore"
        " ('lm_head'); set ignore to what it should leave"
    )


def test_a_target_that_the_default_ignore_names() -> None:
    assert stages(", targets: [lm_head]")[0].ignore == ("router",)
    assert stages(", targets: [lm_head], ignore: [lm_head]")[0].ignore == ("lm_head",)


def test_a_model_without_a_head_refuses_it_as_a_target() -> None:
    with pytest.raises(RecipeError, match="'lm_head' matches no layer"):
        assign(stages(", targets: [lm_head], ignore: []"), LINEARS[:-1])


def test_two_stages_may_not_claim_one_layer() -> None:
    assert refusal("", ", targets: [q_proj]") == (
        "r.yaml:4: stages[1].targets: model.layers.0.self_attn.q_proj already belongs to stages[0];"
        " add it to the ignore of one of the two"
    )
