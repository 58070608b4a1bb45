"""Text that is calibrated on and evaluated on is told in the plan."""

from pathlib import Path
from typing import Any

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
