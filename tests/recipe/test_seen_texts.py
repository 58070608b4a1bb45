"""Text that is calibrated on and evaluated on is told in the plan."""

from pathlib import Path
from typing import Any

from compress.recipe.seen_texts import calibrated_too
from compress.verbs import make_plan
from helpers.short_runs import GPTQ, WORDS, recipe


def test_a_link_is_what_it_leads_to(tiny: Any, tmp_path: Path) -> None:
    words, link = tmp_path / "words.txt", tmp_path / "link.txt"
    words.write_text(WORDS * 9)
    link.symlink_to(words)
    sources = {"sources": [{"text": str(words)}], "samples": 2, "length": 8}
    for evaluated, told in ((link, True), (tmp_path / "other.txt", False)):
        asked = recipe(GPTQ, calibration=sources, evaluation={"texts": [{"text": str(evaluated)}]})
        warnings = make_plan(asked, tiny("llama")).warnings
        assert any("is calibrated on and evaluated on" in x for x in warnings) == told


def test_a_pattern_is_what_it_matches(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(WORDS)
    sources = {"sources": [{"text": str(tmp_path / "*.txt")}], "samples": 2, "length": 8}
    for name, told in (("b.txt", 1), ("c.txt", 0)):
        texts = [{"text": str(tmp_path / name)}]
        asked = recipe(GPTQ, calibration=sources, evaluation={"texts": texts})
        assert len(calibrated_too(asked)) == told


def test_parts_of_a_data_set_are_texts_of_their_own() -> None:
    hub = {"hub": "owner/stories", "split": "train"}
    for split, told in (("train", 1), ("test", 0)):
        texts = [{"hub": "owner/stories", "split": split}]
        asked = recipe(GPTQ, calibration={"sources": [hub]}, evaluation={"texts": texts})
        assert len(calibrated_too(asked)) == told
