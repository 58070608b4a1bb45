"""The top of the page: one sentence and the headline cards."""

import re

from compress.report import tasks, units
from compress.report.markup import Html, Node, el
from compress.report.records.quality import TextQuality
from compress.report.schema import Report
from compress.report.summary import (
    bits_before,
    has_before,
    headline,
    is_of_speed,
    is_rounded,
    losses,
    model_name,
    perplexity,
    spoken_name,
    verdict,
    whole_file_bits,
    windowed_contexts,
)


def sentence(report: Report) -> Html:
    """What happened, in words."""
    before, after = report.source.bytes, report.result.bytes
    parts: list[Node] = [
        f"{units.size(before)} became ",
        el("strong", _unbroken(units.size(after))),
        f", {units.smaller(before, after)}.",
    ]
    text = headline(report)
    if not has_before(report):
        parts = [] if text is None else _alone(text)
    if text is not None and text.ppl_source is not None:
        change = perplexity(text)
        moved = "went from" if change.relative else "stayed at"
        parts += [
            f" On {spoken_name(text)}, perplexity {moved} {units.significant(text.ppl_source)} to ",
            el("strong", units.significant(text.ppl_result)),
            f" ({units.deviation(change.relative)}).",
        ]
    if text is not None and text.top1_agreement is not None:
        parts += [
            " Both models put the same token first ",
            el("strong", _unbroken(units.percent(text.top1_agreement))),
            " of the time.",
        ]
    parts += _beside_plain(text)
    return el("p", *map(_unbroken, parts), class_="lead")


def _beside_plain(text: TextQuality | None) -> list[Node]:
    said = None if text is None else verdict(text)
    shown = None if text is None else losses(text)
    if said is None or shown is None:
        return []
    return [" The result ", el("strong", said), f" at the same bits ({shown[0]} {shown[2]})."]


def _alone(text: TextQuality) -> list[Node]:
    shown = el("strong", units.significant(text.ppl_result))
    return [f"Perplexity on {spoken_name(text)} is ", shown, "."]


def cards(report: Report) -> Html:
    """The grid of headline numbers."""
    first = [_size(report), _bits(report), *_quality(report)]
    return el("div", *first, _time(report), _memory(report), _kv(report), class_="cards")


def _card(title: str, value: Node, under: str, before: str | None = None) -> Html:
    arrow = None
    if before is not None:
        arrow = el("span", f"{before} ", el("span", "→", class_="arrow"), " ", class_="before")
    return el(
        "div",
        el("h3", title),
        el("p", arrow, el("span", value, class_="after"), class_="value"),
        el("p", _unbroken(under), class_="under"),
        class_="card",
    )


def _unbroken(node: Node) -> Node:
    """Text in which no line ends between a number and its unit."""
    if not isinstance(node, str):
        return node
    return re.sub(r"(?<=\d) (?=(?:%|[kMGTP]?B|min|s|h)(?!\w))", "\N{NO-BREAK SPACE}", node)


def _size(report: Report) -> Html:
    before, after = report.source.bytes, report.result.bytes
    if not has_before(report):
        return _card("Size", units.size(after), "of the weight files")
    return _card("Size", units.size(after), units.smaller(before, after), units.size(before))


def _bits(report: Report) -> Html:
    before, whole = bits_before(report), whole_file_bits(report)
    counted = "compressed linears" if is_rounded(report) else "linears"
    under = f"of the {counted}, scales included"
    if whole is not None:
        under = f"{counted}; {units.trimmed(whole)} over the whole model"
    return _card(
        "Bits per weight",
        units.trimmed(report.result.bits_per_weight),
        under,
        None if before is None else units.trimmed(before),
    )


def _quality(report: Report) -> list[Html]:
    text = headline(report)
    if text is None:
        asked = [_task(row) for row in tasks.rows(report)]
        none = [_card("Perplexity", units.MISSING, "not evaluated in this run")]
        return asked[:3] or ([] if is_of_speed(report) else none)
    change = perplexity(text)
    under = f"on {spoken_name(text)}"
    if change.relative is not None:
        under = f"{units.deviation(change.relative)} on {spoken_name(text)}"
    before = None if text.ppl_source is None else units.significant(text.ppl_source)
    shown = [_card("Perplexity", units.significant(text.ppl_result), under, before)]
    if text.kl is not None:
        shown.append(_card("KL divergence", units.significant(text.kl, 2), "nats a token"))
    if text.top1_agreement is not None:
        shown.append(
            _card("Top-1 agreement", units.percent(text.top1_agreement), "same token ranked first")
        )
    return shown


def _task(row: tasks.TaskRow) -> Html:
    return _card(row.task, row.after, row.remark, row.before)


def _time(report: Report) -> Html:
    longest = sorted(report.stages, key=lambda stage: -stage.seconds)[:2]
    under = ", ".join(f"{stage.name} {units.duration(stage.seconds)}" for stage in longest)
    return _card("Time", units.duration(report.seconds), under or units.MISSING)


def _memory(report: Report) -> Html:
    under = f"of {units.size(report.machine.memory)} in the machine"
    if report.peak_gpu_bytes is not None:
        under = f"and {units.size(report.peak_gpu_bytes)} on the GPU"
    return _card("Peak memory", units.size(report.peak_rss_bytes), under)


def _kv(report: Report) -> Html | None:
    before, after = report.source.kv_bytes_per_token, report.result.kv_bytes_per_token
    if after is None:
        return None
    changed = has_before(report) and before not in (None, after)
    shown = units.size(before) if changed and before is not None else None
    remark = "per token of context, when served"
    whole = windowed_contexts(report)
    if whole is not None:
        remark += f"; {units.size(whole[1])} a context of {report.result.context}"
    return _card("KV cache", units.size(after), remark, shown)


_KINDS = {
    "run": "Compression report",
    "eval": "Evaluation report",
    "roofline": "Speed report, predicted",
    "bench": "Speed report",
}


def title(report: Report) -> Html:
    """The page's heading: the model, and below it what was done to it."""
    kind = _KINDS.get(report.command, "Report")
    about = [report.recipe.name, report.source.architecture, report.result.format]
    return el(
        "div",
        el("p", kind, class_="eyebrow"),
        el("h1", model_name(report)),
        el("p", " · ".join(part for part in about if part), class_="about"),
    )
