"""docs/recipes.md names what there is: methods, presets, built-in recipes, keys."""

import dataclasses
import re
from pathlib import Path

import pytest

from compress.edits import EDITS
from compress.methods import METHODS
from compress.quant.scheme import PRESETS
from compress.recipe import builtin_names, load
from compress.recipe.lookup import builtin
from compress.recipe.reading.parse import parse
from compress.recipe.task_config import KINDS, TaskConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text()


def first_column(heading: str) -> set[str]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row)}


def test_tables_are_complete() -> None:
    assert first_column("Methods") == set(METHODS)
    assert first_column("Edits") == set(EDITS)
    assert first_column("Schemes") == set(PRESETS)
    assert first_column("Built-in recipes") == set(builtin_names())


@pytest.mark.parametrize("name", builtin_names())
def test_built_in_recipes_have_no_place_left_to_fill(name: str) -> None:
    text = builtin(name).text
    assert re.findall(r"@@|\{\w*\}|<[\w .-]+>|\$\{?\w+|TODO|TBD|FIXME|XXX|\?\?", text) == []


def test_the_readme_s_mistake_has_its_place() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    place = load("int4-gptq").stages[0].at("group_size")
    assert f"error: {place}: model.layers.0.self_attn.q_proj has 64 input columns" in readme


def test_the_example_is_a_recipe() -> None:
    example = PAGE.split("```yaml\n")[1].split("```")[0]
    recipe = parse(example)
    assert recipe.calibration is not None
    assert recipe.evaluation is not None
    assert len(recipe.calibration.sources) == 6
    assert recipe.evaluation.samples.prompts == ("Once upon a time",)


def test_the_keys_of_a_task_are_in_the_documents() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text()
    section = page.split("## Tasks\n")[1].split("\n## ")[0]
    table = section.split("| key | default | meaning |")[1].split("\n\n")[0]
    keys = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(keys) == sorted(field.name for field in dataclasses.fields(TaskConfig))
    kinds = re.findall(r"^\| `(\w+)` \| `\w+`", section.split("| key |")[0], re.MULTILINE)
    assert tuple(kinds) == KINDS
    example = "name: x\nstages: [{method: rtn, scheme: W4A16}]\n"
    evaluation = parse(example + section.split("```yaml\n")[1].split("```")[0]).evaluation
    assert evaluation is not None
    assert [task.name for task in evaluation.tasks] == ["copa", "arc_easy", "gsm8k"]


def test_the_overrides_of_the_page_are_a_stage_s() -> None:
    section = PAGE.split("## Overrides\n")[1]
    example = "name: x\n" + section.split("```yaml\n")[1].split("```")[0]
    stages = parse(example).stages
    assert [stage.scheme.describe() for stage in stages if stage.scheme] == [
        "int4 sym g32",
        "int8 sym g32",
        "int8 sym channel",
        "int4 sym g32",
    ]
    assert [claim.skip for claim in stages[0].claims] == [False, False, False, True]
