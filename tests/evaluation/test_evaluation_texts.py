"""Texts of an evaluation: lengths that fit the model, tokenizers that agree, names that differ."""

import json
import shutil
from pathlib import Path

import pytest

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, DataError, RecipeError
from compress.recipe import load
from compress.verbs import EvaluationOptions, evaluate_checkpoint, make_plan, run
from helpers.short_runs import RTN, WORDS, recipe

SELF = {"evaluation": {"texts": [{"self": True, "samples": 2, "length": 16}]}}


@pytest.fixture
def words(tmp_path: Path) -> Path:
    (tmp_path / "words.txt").write_text(WORDS * 3)
    return tmp_path / "words.txt"


def test_lengths_of_a_built_in_recipe_follow_the_context(tiny) -> None:
    plan = make_plan("int4-gptq-g4", tiny("llama"))
    assert plan.recipe.calibration is not None
    assert plan.recipe.evaluation is not None
    assert plan.recipe.calibration.length == plan.recipe.evaluation.texts[0].length == 128
    assert "calibration.length is 128, the model's context, instead of the default 512" in (
        plan.warnings
    )
    assert plan.problems == ()


def test_a_length_that_the_user_wrote_is_refused(tiny, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"calibration.length: is 400, the model's context is"):
        run(
            "int4-gptq-g4",
            tiny("llama"),
            tmp_path / "out",
            overrides=["calibration.length=400"],
        )


def test_text_of_its_own_needs_no_tokenizer(tiny, tmp_path: Path, words: Path) -> None:
    source = Path(shutil.copytree(tiny("llama"), tmp_path / "source"))
    for file in source.glob("tokenizer*"):
        file.unlink()
    report = run(recipe(RTN, **SELF), source, tmp_path / "out")
    assert report.quality is not None
    assert report.quality.texts[0].settings["bos"] == "none"
    alone = evaluate_checkpoint(tmp_path / "out", EvaluationOptions(texts=["self"]))
    assert alone.quality is not None
    assert alone.quality.texts[0].settings["sampled_length"] == 128
    with pytest.raises(DataError, match="tokenizer"):
        evaluate_checkpoint(tmp_path / "out", EvaluationOptions(texts=["self", str(words)]))


def test_every_model_is_opened_once(
    tiny, tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured is what was opened, and hashed where the report has its sha256."""
    opened: list[Path] = []
    whole = Checkpoint.open.__func__
    monkeypatch.setattr(
        Checkpoint,
        "open",
        classmethod(lambda cls, folder: opened.append(folder) or whole(cls, folder)),
    )
    small = EvaluationOptions(texts=[str(words)], window=16, stride=8)
    evaluate_checkpoint(tiny("llama"), small)
    assert opened == [tiny("llama")]
    opened.clear()
    evaluate_checkpoint(tiny("llama"), small, against=tiny("llama"))
    assert opened == [tiny("llama")] * 2


def test_another_tokenizer_is_refused(tiny, tmp_path: Path, words: Path) -> None:
    source, other = tiny("llama"), tmp_path / "other"
    shutil.copytree(source, other)
    file = other / "tokenizer.json"
    held = json.loads(file.read_text())
    vocab = held["model"]["vocab"]
    held["model"]["vocab"] = dict(zip(vocab, reversed(vocab.values()), strict=True))
    file.write_text(json.dumps(held))
    with pytest.raises(CheckpointError, match=r"the tokenizers of .* differ: token \d+ of") as it:
        evaluate_checkpoint(source, EvaluationOptions(texts=[str(words)]), against=other)
    assert str(source) in str(it.value)
    assert str(other) in str(it.value)
    held["model"]["vocab"] = vocab
    file.write_text(json.dumps(held, indent=7))  # another file, the same tokens
    assert (
        evaluate_checkpoint(source, EvaluationOptions(texts=[str(words)]), against=other).quality
        is not None
    )


def test_texts_of_one_stem_go_by_their_folders(tiny, tmp_path: Path, words: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(words, tmp_path / name)
    texts = [str(tmp_path / name / words.name) for name in ("a", "b")]
    quality = evaluate_checkpoint(tiny("llama"), EvaluationOptions(texts=texts)).quality
    assert quality is not None
    assert [text.name for text in quality.texts] == ["a/words", "b/words"]
    texts_of_a_recipe = [{"text": text} for text in texts]
    asked = recipe(RTN, evaluation={"texts": [*texts_of_a_recipe, "self"]})
    report = run(asked, tiny("llama"), tmp_path / "out")
    assert report.quality is not None
    assert [text.name for text in report.quality.texts] == ["a/words", "b/words", "self"]


def test_recipes_of_the_wrong_type() -> None:
    with pytest.raises(RecipeError, match="recipe is 5; it takes a Recipe, a file or the name"):
        load(5)
    with pytest.raises(RecipeError, match="overrides is 'seed=1'; it takes a list of texts"):
        load("demo", "seed=1")


def test_an_override_inside_a_scheme_has_its_own_place() -> None:
    with pytest.raises(RecipeError) as caught:
        load("demo", ["stages[0].scheme={bits: 9}"])
    assert str(caught.value).startswith("--set stages[0].scheme={bits: 9}: stages[0].scheme.bits:")
