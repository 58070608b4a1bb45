"""What the compression cost: the table of texts, tasks, and text from both models side by side."""

import json
from typing import Any

from compress.report import tasks, units
from compress.report.markup import Html, Node, el, join
from compress.report.parts import Cell, Column, number, scalar, section, table
from compress.report.records.quality import MathQuality, Quality, TaskQuality, TextQuality
from compress.report.schema import Report, Sample
from compress.report.summary import (
    common_prefix,
    is_of_speed,
    layer_errors,
    perplexity,
    verdict,
)

_COLUMNS = [
    Column("Text"),
    Column("Tokens", True),
    Column("Perplexity before", True),
    Column("after", True, alone="Perplexity after"),
    Column("change", True, alone="Perplexity, change"),
    Column("KL, nats a token", True, "mean KL(source || result)"),
    Column("Top-1 agreement", True, "both models rank the same token first"),
]

_PLAIN_COLUMNS = [
    Column("Text"),
    Column("Perplexity", True, "rounded to nearest under the same schemes, without data"),
    Column("KL, nats a token", True, "mean KL(source || plainly rounded)"),
    Column("Top-1 agreement", True, "source and plainly rounded rank the same token first"),
    Column("The result"),
]

_MATH_COLUMNS = [
    Column("Text"),
    Column("Math"),
    Column("Perplexity", True),
    Column("KL, nats a token", True, "mean KL(exact || math)"),
    Column("Top-1 agreement", True, "the token ranked first is the one that exact products give"),
]

_TASK_COLUMNS = [
    Column("Task"),
    Column("Number"),
    Column("Items", True),
    Column("Before", True),
    Column("after", True),
    Column("±", True, "standard error over the items; of shares in percentage points", "After, ±"),
    Column("change", True, "of shares in percentage points"),
    Column("±", True, "standard error of the change, item by item", "Change, ±"),
]


def quality(report: Report) -> Html | None:
    """Perplexity, divergence and tasks; None where speed alone was looked at."""
    found = report.quality
    if found is None and is_of_speed(report):
        return None
    if found is None or not (found.texts or found.tasks):
        why = "This run measured no quality; `compress-model eval` does."
        return section("quality", "Quality", el("p", why, class_="empty"))
    body: list[Node] = []
    if found.texts:
        rows = [_row(text) for text in found.texts]
        body += [table("Quality by text", _COLUMNS, rows), _settings(found.texts)]
    body.append(_plain(report, found))
    rounded = [_math_row(text.name, text.math) for text in found.texts if text.math is not None]
    if rounded:
        body += [
            el("h3", "In the engine"),
            table("What rounded inputs of products cost", _MATH_COLUMNS, rounded),
        ]
    if found.tasks:
        body += [
            el("h3", "Tasks"),
            table("Quality by task", _TASK_COLUMNS, _task_rows(report)),
            _task_settings(found.tasks),
        ]
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


def _plain(report: Report, found: Quality) -> Html | None:
    """What plain rounding at the same bits costs, and the result between that and lossless."""
    notes, errors = [], layer_errors(report)
    if errors is not None:
        count, error, plain = errors
        notes.append(
            f"On the calibration data, the mean error of {units.counted(count, 'layer')} is"
            f" {units.significant(error)}; rounded to nearest, with scales chosen by the same data,"
            f" {units.significant(plain)}."
        )
    if found.plain_reason is not None and found.texts:
        notes.append(f"Plain rounding was not measured on texts: {found.plain_reason}.")
    rows = [_plain_row(text) for text in found.texts if text.plain is not None]
    if not rows and not notes:
        return None
    return join(
        [
            el("h3", "Beside plain rounding"),
            table("Plain rounding", _PLAIN_COLUMNS, rows) if rows else None,
            *[el("p", note, class_="note") for note in notes],
        ]
    )


def _plain_row(text: TextQuality) -> list[Cell]:
    plain = text.plain
    assert plain is not None
    top1, closed = plain.top1_agreement, plain.closed
    return [
        Cell(text.name),
        number(plain.perplexity, _perplexity(plain.perplexity)),
        number(plain.kl),
        number(top1, None if top1 is None else units.percent(top1)),
        Cell(verdict(text) or units.MISSING, closed, "worse" if (closed or 0.0) < 0 else None),
    ]


def _math_row(name: str, found: MathQuality) -> list[Cell]:
    return [
        Cell(name),
        Cell(found.math),
        number(found.perplexity, _perplexity(found.perplexity)),
        number(found.kl),
        number(found.top1_agreement, units.percent(found.top1_agreement)),
    ]


def _task_rows(report: Report) -> list[list[Cell]]:
    rows = []
    for row in tasks.rows(report):
        shown = (row.before, row.after, row.error, row.change, row.change_error)
        cells = [Cell(units.MISSING if text is None else text) for text in shown]
        items = number(row.items, units.whole(row.items))
        rows.append([Cell(row.task), Cell(row.number), items, *cells])
    return rows


def _task_settings(found: dict[str, TaskQuality]) -> Html:
    """How each was asked, how many contexts were cut, and how often both models did the same."""
    return join(
        [
            el("p", f"{name}: {'; '.join(_asked(task))}.", class_="note")
            for name, task in sorted(found.items())
        ]
    )


def _asked(task: TaskQuality) -> list[str]:
    parts = [task.kind.replace("_", " ")]
    if task.same_answers is not None:
        parts.append(f"both models answer alike {units.percent(task.same_answers)} of the time")
    if task.truncated:
        parts.append(f"{units.counted(task.truncated, 'context')} cut at the beginning")
    return parts + [
        f"{key.replace('_', ' ')} {_quoted(key, v)}" for key, v in task.settings.items()
    ]


def _quoted(key: str, value: Any) -> str:
    """Texts as JSON, so that line ends and blanks in a prompt show."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _flat(key, value)


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


def samples(report: Report) -> Html | None:
    """The same prompts continued by both models; None where speed alone was looked at."""
    if not report.samples and is_of_speed(report):
        return None
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
