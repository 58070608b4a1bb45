"""A model card quotes names and reasons as words: none becomes markup where it is shown."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from compress.report.markdown import block, code, words
from compress.runs.card import model_card
from compress.verbs import make_plan
from helpers.short_runs import RTN, recipe

HOSTILE = "<img src=x onerror=alert(1)>](http://evil) **b** `c` | d\n# e ![f](g) $x$ \x1b[31m"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append(tag)


def unescaped(line: str) -> str:
    return re.sub(r"\\(?=[!-/:-@\[-`{-~])", "", line)


def test_words_read_as_they_were() -> None:
    line = words(HOSTILE)
    assert "\n" not in line
    assert unescaped(line) == " ".join(HOSTILE.replace("\x1b", "�").split())
    for mark in ("<", ">", "`", "*", "[", "]", "|", "$", "&"):
        assert not re.search(rf"(?<!\\){re.escape(mark)}", line), mark
    assert "://" not in line
    assert words("tale-6m (v1.2), 4 bits") == "tale-6m (v1.2), 4 bits"


@pytest.mark.parametrize("text", ["plain", "a`b", "``", "`a``b`", " x "])
def test_code_is_fenced_by_more_than_it_holds(text: str) -> None:
    found = re.fullmatch(r"(`+)(.*?)\1", code(text))
    assert found is not None
    assert found[1] not in found[2].strip("` ") or "`" not in found[2]
    assert " ".join(text.split()) in found[2]


def test_a_block_ends_where_it_ends() -> None:
    assert block("a\n```\nb") == "````\na\n```\nb\n````"
    assert block("a") == "```\na\n```"


def test_a_card_holds_no_markup_of_others(tiny: Any) -> None:
    plan = make_plan(recipe(RTN), tiny("llama"))
    named = replace(plan, recipe=replace(plan.recipe, name=HOSTILE))
    card = model_card(named, HOSTILE, "1").decode()
    tags = Tags()
    outside = re.sub(r"(`+).*?\1", "", "\n".join(unfenced(card)))
    tags.feed(outside.replace("\\<", "&lt;"))
    assert not tags.found
    assert "\n# e" not in card
    assert "](http" not in outside.replace("\\]", "")


def unfenced(card: str) -> list[str]:
    """Lines of a card but its code."""
    kept, inside = [], False
    for line in card.splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            kept.append(line)
    return kept
