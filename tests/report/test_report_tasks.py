"""Tasks on the page and in the terminal table."""

from dataclasses import replace

import pytest

from compress.report.html import render_html
from compress.report.records.quality import Quality, TaskNumber, TaskQuality
from compress.report.schema import Report
from compress.report.terminal.table import render_table

CHOICES = TaskQuality(
    kind="multiple_choice",
    items=1838,
    truncated=2,
    numbers={
        "acc": TaskNumber(0.6125, 0.0114, 0.6156, 0.0113, 0.0018),
        "acc_norm": TaskNumber(0.62, 0.0114, 0.62, 0.0113, 0.0018),
    },
    same_answers=0.962,
    settings={"prompt": "{query}", "delimiter": "\nAnswer: ", "dtype": "fp32"},
)
WORDS = TaskQuality(
    kind="continuation",
    items=40,
    truncated=0,
    numbers={
        "acc": TaskNumber(0.05, 0.035, 0.075, 0.042, 0.025),
        "perplexity": TaskNumber(27236.0, 11000.0, 25845.0, 10000.0, 2189.0),
    },
)
ONE = TaskQuality("generation", 1, 0, {"exact_match": TaskNumber(1.0)})


@pytest.fixture
def compared(report: Report) -> Report:
    assert report.quality is not None
    return replace(report, quality=replace(report.quality, tasks={"piqa": CHOICES, "words": WORDS}))


@pytest.fixture
def alone(report: Report) -> Report:
    numbers = {"acc": TaskNumber(0.6125, 0.0114)}
    tasks = {"piqa": replace(CHOICES, numbers=numbers, same_answers=None), "sums": ONE}
    return replace(report, quality=Quality(tasks=tasks))


def lines(report: Report) -> list[str]:
    return render_table(report).splitlines()


def test_every_number_of_every_task_has_a_line(compared: Report) -> None:
    shown = lines(compared)
    at = next(i for i, line in enumerate(shown) if line.startswith("piqa"))
    assert shown[at : at + 4] == [
        "piqa                      61.6 %      61.2 %   acc, −0.3 ±0.2",
        "                          62.0 %      62.0 %   acc_norm, 0.0 ±0.2",
        "words                      7.5 %       5.0 %   acc, −2.5 ±2.5",
        "                          25,845      27,236   perplexity, +1,391 ±2,189",
    ]


def test_a_model_alone_has_its_own_error(alone: Report) -> None:
    shown = lines(alone)
    assert "piqa                                  61.2 %   acc, ±1.1" in shown
    assert "sums                                   100 %   exact_match" in shown
    assert not any(line.startswith("Perplexity") for line in shown)


def test_long_names_are_cut(compared: Report) -> None:
    assert compared.quality is not None
    tasks = {"a_name_of_many_characters_and\x1b[31m": WORDS}
    shown = render_table(replace(compared, quality=Quality(tasks=tasks)))
    assert "\na_name_of_many_c...  " in shown
    assert "\x1b" not in shown


def test_the_page_says_how_tasks_were_asked(compared: Report) -> None:
    page = render_html(compared)
    prompt = "prompt &quot;{query}&quot;; delimiter &quot;\\nAnswer: &quot;; dtype &quot;fp32"
    for words in (
        "piqa: multiple choice; both models answer alike 96.2 % of the time; 2 contexts cut",
        f"at the beginning; {prompt}",
        "words: continuation.",
        "acc_norm",
        "+1,391",
    ):
        assert words in page, words


def test_cards_are_of_tasks_where_there_is_no_text(alone: Report, compared: Report) -> None:
    page = render_html(alone)
    assert "not evaluated in this run" not in page
    assert "<h3>piqa</h3>" in page
    assert "<h3>piqa</h3>" not in render_html(compared)
