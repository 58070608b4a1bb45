"""Copies of what is evaluated on are found by what they say, in any file and format."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.recipe import Recipe
from compress.verbs import make_plan
from compress_calibration.config import SourceConfig
from compress_calibration.fingerprints import fingerprints
from helpers.short_runs import GPTQ, WORDS, recipe

STORIES = [f"{number} {WORDS[number:]}" for number in range(40)]
FEW = {"method": "distill", "tokens": 64, "scope": "block", "length": 8}


def text_file(path: Path, stories: list[str]) -> Path:
    path.write_text("\n<|endoftext|>\n".join(stories))
    return path


def json_file(path: Path, stories: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": f"  {x}\n"}) + "\n" for x in stories))
    return path


def trained(learned: dict[str, Any], evaluated: dict[str, Any]) -> Recipe:
    cast = {"method": "cast", "dtype": "fp32"}
    return recipe(cast, {**FEW, "sources": [learned]}, evaluation={"texts": [evaluated]})


def test_a_copy_is_no_text_to_train_on(tiny: Any, tmp_path: Path) -> None:
    evaluated = text_file(tmp_path / "test.txt", STORIES[:30])
    for learned in (
        {"text": str(text_file(tmp_path / "copy.txt", STORIES[:30]))},
        {"jsonl": str(json_file(tmp_path / "copy.jsonl", STORIES[20:]))},
    ):
        (path,) = learned.values()
        shared = 30 if path.endswith("txt") else 10
        (problem,) = make_plan(trained(learned, {"text": str(evaluated)}), tiny("llama")).problems
        assert problem.endswith(
            f"stages[1].method: distill trains on {path}, which shares {shared} of 30 documents"
            f" with {evaluated}, which is evaluated on; give it another text (sources), or evaluate"
            " on another"
        )
    other = {"text": str(text_file(tmp_path / "other.txt", STORIES[30:]))}
    plan = make_plan(trained(other, {"text": str(evaluated)}), tiny("llama"))
    assert not plan.problems
    assert not any("shares" in line for line in plan.warnings)
    # Only what is read of it counts.
    whole = {"text": str(text_file(tmp_path / "whole.txt", STORIES)), "max_documents": 30}
    assert not make_plan(trained(other, whole), tiny("llama")).problems
    few = {"text": str(tmp_path / "whole.txt"), "max_tokens": 100}
    assert not make_plan(trained(other, few), tiny("llama")).problems


def test_a_few_that_lie_in_both_are_told(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two documents, whatever their share of those evaluated on; more by their share."""
    evaluated = {"text": str(text_file(tmp_path / "test.txt", STORIES[:30]))}
    learned = {"text": str(text_file(tmp_path / "train.txt", STORIES[28:]))}
    plan = make_plan(trained(learned, evaluated), tiny("llama"))
    assert not plan.problems
    (line,) = (x for x in plan.warnings if "shares" in x)
    assert line.startswith(f"distill trains on {tmp_path / 'train.txt'}, which shares 2 of 30 docu")
    learned = {"text": str(text_file(tmp_path / "train.txt", STORIES[27:]))}
    assert make_plan(trained(learned, evaluated), tiny("llama")).problems
    monkeypatch.setattr("compress.runs.shared_text.COPIED", 0.2)
    assert not make_plan(trained(learned, evaluated), tiny("llama")).problems


def test_of_many_files_it_is_told_how_each_begins(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.runs.shared_text.READ", 12 * len(STORIES[0]))
    monkeypatch.setattr("compress.runs.shared_text.LEAST", 1)
    for name in "abc":
        text_file(tmp_path / f"{name}.txt", [f"{name} {x}" for x in STORIES])
    evaluated = {"jsonl": str(json_file(tmp_path / "test.jsonl", [f"b {x}" for x in STORIES]))}
    asked = trained({"text": str(tmp_path / "*.txt")}, evaluated)
    (problem,) = make_plan(asked, tiny("llama")).problems
    assert f"{tmp_path / 'b.txt'}, which shares " in problem
    shared = int(problem.partition("shares ")[2].partition(" ")[0])
    assert 4 <= shared < 12  # of what is looked at of the text, a third is of each file


def test_what_is_calibrated_on_is_told_as_one_file_is(tiny: Any, tmp_path: Path) -> None:
    texts = [{"text": str(text_file(tmp_path / "test.txt", STORIES[:30]))}]
    copy = str(json_file(tmp_path / "copy.jsonl", STORIES))
    sources = {"sources": [{"jsonl": copy}], "samples": 2, "length": 8}
    plan = make_plan(recipe(GPTQ, calibration=sources, evaluation={"texts": texts}), tiny("llama"))
    assert not plan.problems
    (line,) = (x for x in plan.warnings if "shares" in x)
    assert line.startswith(f"calibration reads {copy}, which shares 30 of 30 documents with ")


def test_a_fingerprint_is_of_what_a_document_says(tmp_path: Path) -> None:
    def of(name: str, *stories: str) -> list[bytes]:
        path = text_file(tmp_path / name, list(stories))
        return list(fingerprints(SourceConfig("text", str(path)), None))  # type: ignore[arg-type]

    story = "the café by the door was closed, so we went on in the rain"
    assert of("a", story) == of("b", story.replace(" ", "\n "), "Too short.")
    assert of("a", story) == of("b", story.replace("é", "e\u0301"))
    assert of("a", story) != of("b", story.upper())
    source = SourceConfig("text", str(text_file(tmp_path / "a", [story] * 100)))
    some = fingerprints(source, None, most=1000)  # type: ignore[arg-type]
    assert len(list(some)) == -(-1000 // len(story))
