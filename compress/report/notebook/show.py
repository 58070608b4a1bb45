"""What a notebook shows of a report or a plan, and the line that a prompt does."""

from collections.abc import Iterable, Sequence

from compress.report import units
from compress.report.markup import Html, el
from compress.report.schema import Report
from compress.report.summary import has_before, headline, model_name
from compress.report.terminal.table import render_table, table_rows

# Notebooks set tables right and small; names read better from the left.
_LEFT = "text-align:left"


def report_line(report: Report) -> str:
    """<Report tale-6m demo: 12.3 MB -> 4.84 MB, perplexity 8.751 -> 8.942>"""
    parts = [units.size(report.result.bytes)]
    if has_before(report):
        parts = [f"{units.size(report.source.bytes)} -> {parts[0]}"]
    text = headline(report)
    if text is not None:
        found = units.significant(text.ppl_result, 4)
        before = "" if text.ppl_source is None else f"{units.significant(text.ppl_source, 4)} -> "
        parts.append(f"perplexity {before}{found}")
    name = " ".join(filter(None, (model_name(report), report.recipe.name)))
    return f"<Report {name}: {', '.join(parts)}>"


def report_html(report: Report) -> str:
    """The numbers before and after as a table, warnings, and all else behind a click."""
    title = ": ".join(filter(None, (model_name(report), report.recipe.name)))
    heads = ("", "before", "after", "") if has_before(report) else ("", "", "measured", "")
    return block(title, [heads, *table_rows(report)], report.warnings, render_table(report))


def block(title: str, rows: Sequence[Sequence[str]], warnings: Iterable[str], whole: str) -> str:
    """A table under a title. rows: the first has the heads. whole: text, behind a click."""
    head, *body = rows
    found: list[Html] = [
        el("strong", title),
        el("table", _row("th", head), *(_row("td", row) for row in body)),
        *(el("div", el("strong", "warning: "), line) for line in warnings),
        el("details", el("summary", "all of it"), el("pre", whole)),
    ]
    return el("div", *found).text


def text_block(title: str, whole: str) -> str:
    """Text as it is, under a title."""
    return el("div", el("strong", title), el("pre", whole)).text


def _row(kind: str, cells: Sequence[str]) -> Html:
    return el("tr", *(el(kind, cell, style=_LEFT) for cell in cells))
