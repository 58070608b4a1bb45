"""What the compression cost: the table of texts, tasks, and text from both models side by side."""

import json
from typing import Any

from compress.report import units
from compress.report.markup import Html, Node, el, join
from compress.report.parts import Cell, Column, facts_of, number, scalar, section, table
from compress.report.schema import Report, Sample, TextQuality
from compress.report.summary import common_prefix, perplexity

_COLUMNS = [
    Column("Text"),
    Column("Tokens", True),
    Column("Perplexity before", True),
    Column("after", True),
    Column("change", True),
    Column("KL, nats a token", True, "mean KL(source || result)"),
    Column("Top-1 agreement", True, "both models rank the same token first"),
]


def quality(report: Report) -> Html:
    """Perplexity, divergence and tasks."""
    found = report.quality
    if found is None or not (found.texts or found.tasks):
        why = "This run measured no quality; `compress-model eval` does."
        return section("quality", "Quality", el("p", why, class_="empty"))
    body: list[Node] = []
    if found.texts:
        rows = [_row(text) for text in found.texts]
        body += [table("Quality by text", _COLUMNS, rows), _settings(found.texts)]
    if found.tasks:
        body += [el("h3", "Tasks"), facts_of(found.tasks)]
    return section("quality", "Quality", *body)


def _row(text: TextQuality) -> list[Cell]:
    change = perplexity(text).relative
    top1 = text.top1_agreement
    return [
        Cell(text.name),
        number(text.tokens, units.whole(text.tokens)),
        number(text.ppl_source, _perplexity(text.ppl_source)),
        number(text.ppl_result, _perplexity(text.ppl_result)),
        number(change, units.deviation(change)),
        number(text.kl),
        number(top1, None if top1 is None else units.percent(top1)),
    ]


def _perplexity(value: float | None) -> str | None:
    return None if value is None else units.significant(value, 4)


def _settings(texts: tuple[TextQuality, ...]) -> Html | None:
    """How it was measured; texts that were measured alike share a line."""
    alike: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for text in texts:
        if text.settings:
            key = json.dumps(text.settings, sort_keys=True)
            alike.setdefault(key, (text.settings, []))[1].append(text.name)
    lines = []
    for settings, names in alike.values():
        who = "All texts" if len(names) == len(texts) > 1 else ", ".join(names)
        how = "; ".join(f"{key.replace('_', ' ')} {_flat(key, v)}" for key, v in settings.items())
        lines.append(el("p", f"{who}: {how}.", class_="note"))
    return join(lines) if lines else None


def _flat(key: str, value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | tuple) else scalar(key, value)


def samples(report: Report) -> Html:
    """The same prompts continued by both models."""
    if not report.samples:
        why = report.samples_reason or "no prompts were given"
        return section("samples", "Text before and after", el("p", f"None: {why}.", class_="empty"))
    note = "Grey is word for word the same in both."
    shown = [_sample(sample) for sample in report.samples]
    return section("samples", "Text before and after", *shown, note=note)


def _sample(sample: Sample) -> Html:
    # The space between the prompt and its continuation would look like an indent here.
    before, after = sample.source.lstrip(" "), sample.result.lstrip(" ")
    cut = common_prefix(before, after)
    return el(
        "article",
        el("p", el("b", "Prompt"), sample.prompt or "(empty)", class_="prompt"),
        _side("Before", before, cut),
        _side("After", after, cut),
        class_="sample",
    )


def _side(name: str, text: str, cut: int) -> Html:
    shared = el("span", text[:cut], class_="shared") if cut else None
    return el("div", el("h3", name), el("p", shared, text[cut:], class_="words"))
