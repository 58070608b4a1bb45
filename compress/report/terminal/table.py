"""The end of a run in the terminal: plain text, 80 columns, no colours."""

from pathlib import Path

from compress.report import tasks, units
from compress.report.disturbance import disturbance, taken
from compress.report.proofs import loaded, proved
from compress.report.records.quality import MathQuality, TextQuality
from compress.report.schema import Export, Report, Sample, StageRecord
from compress.report.structure import chosen_sizes, other_splits, repaired, trained
from compress.report.summary import (
    bits_before,
    has_before,
    is_rounded,
    layer_errors,
    losses,
    model_changes,
    model_name,
    perplexity,
    schemes,
    windowed_contexts,
)
from compress.report.terminal.cells import COLUMNS, clean, cut, pad, width, wrap
from compress.report.terminal.copied import as_lines

_LABEL, _VALUE, _GAP = 20, 12, "   "
_REMARK = COLUMNS - _LABEL - 2 * _VALUE - len(_GAP)
_SAMPLE_LINES = 4
_INDENT = 10

Row = tuple[str, str, str, str]  # name, before, after, remark


def render_table(report: Report, page: str | Path | None = None) -> str:
    """What the run did: headline numbers, one sample, how to open the result, and the path of the
    page if there is one.

    Lines have 80 cells at most, except that a path is never broken: it is there to be copied.
    """
    head = [cut(": ".join(filter(None, map(clean, (model_name(report), report.recipe.name)))))]
    used = schemes(report)
    if used:
        more = f" and {len(used) - 1} more" if len(used) > 1 else ""
        head.append(cut(f"{clean(used[0])}{more}"))
    for name, before, after in model_changes(report):
        head += _said(name, f"{before} became {after}")
    titles = ("", "before", "after", "") if has_before(report) else ("", "", "measured", "")
    lines = [*head, "", _line(titles), "-" * COLUMNS]
    lines += [_line(row) for row in table_rows(report)]
    disturbed = disturbance(taken(report.stages))
    if disturbed is not None:
        lines += ["", *_said("Note", disturbed)]
    for warning in report.warnings:
        lines += ["", *_said("Warning", warning)]
    for note in report.notes:
        lines += ["", *_said("Note", note)]
    for stage in report.stages:
        lines += _searched(stage)
    for line in filter(None, map(repaired, report.stages)):
        lines += ["", *_said("Refitted", line)]
    for line in filter(None, map(trained, report.stages)):
        lines += ["", *_said("Trained", line)]
    if report.loads is not None:
        lines += ["", *_said("Loads", loaded(report.loads)), *_notes(report.loads.detail)]
    for export in report.exports:
        lines += ["", *_export(export)]
    if report.samples:
        lines += ["", *_sample(report.samples[0])]
    lines += _open(report)
    for export in report.exports:
        lines += _start(export)
    if page is not None:
        lines += ["", "Report", f"  {clean(str(page))}"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _searched(stage: StageRecord) -> list[str]:
    """What a stage has chosen, and what else it might have been."""
    found, others = chosen_sizes(stage), other_splits(stage)
    if found is None:
        return []
    return ["", *_said("Sizes", found), *([] if others is None else _said("  others", others))]


def _export(export: Export) -> list[str]:
    """An artifact for another runtime: its size, how far it was proved, what was converted."""
    made = f"{export.target}, {units.size(export.bytes)}: {proved(export)}"
    return [*_said("Export", made), *_notes(export.notes)]


def _notes(notes: tuple[str, ...]) -> list[str]:
    return [line for note in notes for line in _said("  note", note)]


def _said(name: str, text: str) -> list[str]:
    return _labelled(name, wrap(clean(text), COLUMNS - _INDENT))


def table_rows(report: Report) -> list[Row]:
    """The numbers of a report, before and after: name, both, remark."""
    rows = [
        *_sizes(report),
        *_kv_cache(report),
        *_quality(report),
        *_budget(report),
        *_time(report),
        ("Peak memory", "", units.size(report.peak_rss_bytes), ""),
    ]
    if report.peak_gpu_bytes is not None:
        rows.append(("Peak GPU memory", "", units.size(report.peak_gpu_bytes), ""))
    return rows


def _sizes(report: Report) -> list[Row]:
    before, after = report.source.bytes, report.result.bytes
    stored = units.trimmed(report.result.bits_per_weight)
    remark = "compressed linears, with scales" if is_rounded(report) else "linears"
    if not has_before(report):
        return [("Size", "", units.size(after), ""), ("Bits per weight", "", stored, remark)]
    bits = bits_before(report)
    return [
        ("Size", units.size(before), units.size(after), units.smaller(before, after)),
        ("Bits per weight", units.MISSING if bits is None else units.trimmed(bits), stored, remark),
    ]


def _kv_cache(report: Report) -> list[Row]:
    """Only where the result's differs."""
    before, after = report.source.kv_bytes_per_token, report.result.kv_bytes_per_token
    if not has_before(report):
        return []
    rows = []
    if before is not None and after is not None and before != after:
        rows.append(("KV cache", units.size(before), units.size(after), "per token of context"))
    whole = windowed_contexts(report)
    if whole is not None and whole[0] != whole[1]:
        before, after = whole
        remark = f"a context of {report.result.context}"
        rows.append(("KV cache, windows", units.size(before), units.size(after), remark))
    return rows


def _quality(report: Report) -> list[Row]:
    """A line for each number of the first text; with more texts, one for each of each."""
    texts = () if report.quality is None else report.quality.texts
    asked = _tasks(report)
    if not texts:
        return asked or [("Perplexity", "", units.MISSING, "not evaluated")]
    rows = [("Perplexity", *_perplexity(text, has_before(report))) for text in texts]
    kl = [(text, text.kl) for text in texts if text.kl is not None]
    same = [(text, text.top1_agreement) for text in texts if text.top1_agreement is not None]
    on = {text.name: f"on {clean(text.name)}" if len(texts) > 1 else "" for text in texts}
    rows += [
        *(("KL divergence", "", units.significant(x), on[t.name] or "nats a token") for t, x in kl),
        *(
            ("Top-1 agreement", "", units.percent(x), on[t.name] or "same token ranked first")
            for t, x in same
        ),
        *(row for t in texts for row in _plain(t, on[t.name])),
        *_layer_errors(report),
        *(row for t in texts if t.math is not None for row in _math(t.math, on[t.name])),
    ]
    return [*_named_once(rows), *asked]


def _plain(text: TextQuality, on: str) -> list[Row]:
    """What plain rounding at the same bits costs, and where the result lies beside it."""
    shown, plain = losses(text), text.plain
    if shown is None or plain is None or plain.closed is None:
        return []
    share = units.percent(abs(plain.closed))
    told = f"{share} of it closed" if plain.closed >= 0 else f"{share} better"
    if on:  # the name of the text may be long, and is cut first
        told = told.replace(" of it", "")
    return [("Plain rounding", "", shown[2], f"{told}, {shown[0]} {on}".rstrip())]


def _layer_errors(report: Report) -> list[Row]:
    found = layer_errors(report)
    if found is None:
        return []
    _, error, plain = (found[0], *map(units.significant, found[1:]))
    return [("Error of layers", "", error, f"{plain} if plainly rounded")]


def _math(found: MathQuality, on: str) -> list[Row]:
    """What the engine's math costs on a text."""
    return [
        (f"With {found.math}", "", units.significant(found.perplexity, 4), f"perplexity {on}"),
        ("  KL to exact", "", units.significant(found.kl), on or "nats a token"),
        ("  agreement", "", units.percent(found.top1_agreement), on),
    ]


def _tasks(report: Report) -> list[Row]:
    """A line for each number of each task; changes and errors of shares in percentage points."""
    return _named_once(
        [
            (cut(clean(row.task), _LABEL - 1), row.before or "", row.after, row.remark)
            for row in tasks.rows(report)
        ]
    )


def _budget(report: Report) -> list[Row]:
    """The summed loss of the layers, for a recipe with a target: predicted and as written."""
    if report.budget is None:
        return []
    loss = report.budget.loss
    planned, measured = units.significant(loss.planned), units.significant(loss.measured)
    return [("Loss of the layers", planned, measured, "predicted, measured")]


def _perplexity(text: TextQuality, compared: bool) -> tuple[str, str, str]:
    change = perplexity(text)
    missing = units.MISSING if compared else ""
    source = missing if text.ppl_source is None else units.significant(text.ppl_source, 4)
    moved = "" if change.relative is None else f"{units.deviation(change.relative)}, "
    return source, units.significant(text.ppl_result, 4), f"{moved}on {clean(text.name)}"


def _named_once(rows: list[Row]) -> list[Row]:
    """The name in the first of the rows that share it."""
    before = ["", *(row[0] for row in rows)]
    return [
        ("" if name == row[0] else row[0], *row[1:])
        for name, row in zip(before, rows, strict=False)
    ]


def _time(report: Report) -> list[Row]:
    """The whole and its two longest stages, each on a line of its own where one is too short."""
    longest = sorted(report.stages, key=lambda stage: -stage.seconds)[:2]
    stages = [f"{clean(s.name)} {units.duration(s.seconds)}" for s in longest]
    if width(", ".join(stages)) <= _REMARK:
        stages = [", ".join(stages)]
    first, *more = stages
    return [
        ("Time", "", units.duration(report.seconds), first),
        *(("", "", "", stage) for stage in more),
    ]


def _open(report: Report) -> list[str]:
    """How to open the result, or why nothing is known to."""
    found = [f"  {clean(line)}" for line in report.open_with]
    if not found and report.open_reason is not None:
        found = [f"  {line}" for line in wrap(clean(report.open_reason), COLUMNS - 2)]
    return ["", "Open it", *found] if found else []


def _start(export: Export) -> list[str]:
    """What starts an artifact's runtime."""
    found = [f"  {_kept(line)}".rstrip() for line in as_lines(export.open_with)]
    return ["", f"Start {clean(export.target)}", *found] if found else []


def _kept(line: str) -> str:
    """Cleaned, with the spaces that it begins with."""
    return " " * (len(line) - len(line.lstrip())) + clean(line)


def _line(row: Row) -> str:
    name, before, after, remark = row
    cells = pad(name, _LABEL) + pad(before, _VALUE, left=False) + pad(after, _VALUE, left=False)
    return cut(f"{cells}{_GAP}{remark}")


def _sample(sample: Sample) -> list[str]:
    texts = (("Prompt", sample.prompt), ("Before", sample.source), ("After", sample.result))
    return [line for name, text in texts for line in _labelled(name, _shortened(text))]


def _shortened(text: str) -> list[str]:
    lines = wrap(clean(text), COLUMNS - _INDENT)
    if len(lines) > _SAMPLE_LINES:
        last = cut(lines[_SAMPLE_LINES - 1], COLUMNS - _INDENT - 4)
        return [*lines[: _SAMPLE_LINES - 1], last.removesuffix("...").rstrip() + " ..."]
    return lines


def _labelled(name: str, lines: list[str]) -> list[str]:
    return [pad("" if place else name, _INDENT) + line for place, line in enumerate(lines)]
