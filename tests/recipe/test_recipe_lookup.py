"""A path, a built-in name, or a helpful refusal."""

from pathlib import Path
from typing import Any

import pytest

from compress.edits import EDITS
from compress.edits.cast import CastConfig
from compress.errors import RecipeError
from compress.recipe import EditStage, Recipe, builtin_names, load
from compress.recipe.reading.parse import parse

TEXT = "name: mine\nstages:\n  - method: rtn\n    scheme: W8A16\n"


def refusal(what: str | Path | Recipe, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(what, overrides)
    return str(caught.value)


def test_a_file_wins_over_a_built_in_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("int4-rtn").name == "int4-rtn"
    (tmp_path / "int4-rtn").write_text(TEXT)
    assert load("int4-rtn").name == "mine"


def test_a_folder_of_that_name_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "int4-rtn").mkdir()
    assert load("int4-rtn").name == "int4-rtn"


def test_paths_in_a_file_start_at_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(TEXT + "evaluation: {texts: [{text: here.txt}]}\n")
    recipe = load(path)
    assert recipe.evaluation is not None
    assert recipe.evaluation.texts[0].path == str(tmp_path / "here.txt")
    assert recipe.at("name") == f"{path}:1: name"


def test_a_mistake_in_a_file_names_it_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(TEXT + "sed: 1\n")
    assert refusal("r.yaml").startswith("r.yaml:5: sed: unknown key 'sed'; allowed: name,")
    assert refusal("int4-rtn", "sed=1").startswith("--set sed=1: sed: unknown key 'sed'")


def test_unknown_name_lists_what_there_is() -> None:
    known = ", ".join(builtin_names())
    assert refusal("int4-gtpq") == (
        f"no recipe 'int4-gtpq': there is no such file, and built in are {known};"
        " did you mean 'int4-gptq'?"
    )


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(TEXT)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    (tmp_path / "folder.yaml").mkdir()
    assert refusal(tmp_path / "mien.yaml") == (
        f"{tmp_path}/mien.yaml: no such recipe file; did you mean 'mine.yaml'?"
    )
    assert refusal(tmp_path / "minee.yml").endswith("; did you mean 'mine.yaml'?")
    assert refusal(tmp_path / "theirs.yaml") == f"{tmp_path}/theirs.yaml: no such recipe file"
    assert refusal(f"{tmp_path}/no/int4-rtn.yaml") == (
        f"{tmp_path}/no/int4-rtn.yaml: no such recipe file; the built-in recipe is called"
        " 'int4-rtn'"
    )
    assert refusal(str(tmp_path / "latin.yaml")).endswith("it is not UTF-8 text")
    assert refusal(str(tmp_path / "folder.yaml")).endswith("it is a folder")


def test_a_recipe_object_is_checked_and_takes_no_overrides() -> None:
    recipe = parse(TEXT)
    assert load(recipe) is recipe
    assert refusal(recipe, "seed=1") == (
        "--set seed=1: recipe 'mine' is already parsed; change it with dataclasses.replace"
    )
    assert refusal(Recipe(name="bare", stages=())) == (
        "stages: is empty; a recipe has one stage or more"
    )


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (["cast"], "stages: is ['cast']; edits take a tuple of EditStage"),
        (("cast",), "stages: is ('cast',); edits take a tuple of EditStage"),
        ((EditStage("cut", None),), f"stages[0].method: is 'cut'; allowed: {', '.join(EDITS)}"),
        ((EditStage("cast", None),), "stages[0]: config is None; cast takes CastConfig"),
    ],
)
def test_edits_of_a_recipe_object_are_checked(edits: Any, message: str) -> None:
    assert refusal(Recipe(name="bare", stages=(), edits=edits)) == message
    assert load(Recipe("fine", (), edits=(EditStage("cast", CastConfig("bf16")),))).stages == ()
    with pytest.raises(RecipeError, match="dtype is 'int8'; it is one of bf16, fp16, fp32"):
        CastConfig("int8")  # type: ignore[arg-type]  # from Python anything can be given
