"""A comparison as one self-contained page, made as that of a report."""

from pathlib import Path

from compress.report import units
from compress.report.codec import Writer, write_whole
from compress.report.comparison.chart import SLIM, WIDE, Loss, scatter
from compress.report.comparison.records import Comparison, Contender
from compress.report.comparison.words import measured, of_files, title, verdict
from compress.report.html import page
from compress.report.markup import Html, Node, el, join
from compress.report.parts import Cell, Column, facts, number, section, table

_FEW = 3  # names that stand beside a line
_COLUMNS = [
    Column("Result"),
    Column("Size", True),
    Column("Bits", True, "a weight of the compressed linears, scales included"),
    Column("KL", True, "mean KL(source || result), nats a token"),
    Column("Perplexity", True),
    Column("Agreement", True, "both models rank the same token first"),
    Column("KV", True, "bytes of keys and values of a token"),
    Column("Tokens/s", True, "of one text in this engine on this machine, as predicted"),
]


def render_page(found: Comparison) -> str:
    """The page as text; it needs no other file and no network, and reads without JavaScript."""
    foot = f"{found.tool} · sizes are decimal: 1 MB is a million bytes"
    return page(f"{title(found)}, compared · compress-model", _heading(found), _body(found), foot)


def write_page(found: Comparison, path: str | Path, write: Writer | None = None) -> None:
    """Write the page; the file appears whole or not at all. write: what puts bytes in a file."""
    (write or write_whole)(Path(path), render_page(found).encode("utf-8", errors="replace"))


def _heading(found: Comparison) -> Html:
    runtime = [f"for {found.wanted.runtime}"] if found.wanted.runtime else []
    about = [found.source.architecture, *runtime]
    return el(
        "div",
        el("p", "Recipes compared", class_="eyebrow"),
        el("h1", title(found)),
        el("p", " · ".join(part for part in about if part), class_="about"),
    )


def _body(found: Comparison) -> list[Node]:
    parts: list[Node] = [el("p", _lead(found), class_="lead"), _winner(found)]
    if found.contenders:
        parts += [*_charts(found), _table(found)]
    return [*parts, _notes(found), _left_out(found), _environment(found)]


def _lead(found: Comparison) -> str:
    said = verdict(found)
    if said or not found.contenders:
        return said or "Nothing was compared."
    least, most = found.contenders[0], found.contenders[-1]
    count = sum(one.on_kl_front for one in found.contenders)
    return (
        f"{units.counted(len(found.contenders), 'result')} from {units.size(least.bytes)} to"
        f" {units.size(most.bytes)}; {count} of them are on the front of size and KL."
    )


def _winner(found: Comparison) -> Html | None:
    best = found.best
    if best is None:
        return None
    kv, speed = best.kv_bytes_per_token, best.tokens_per_second
    cards = [
        ("Size", units.size(best.bytes), units.smaller(found.source.bytes, best.bytes)),
        ("KL divergence", units.significant(best.kl, 2), "nats a token"),
        (
            "Perplexity",
            units.significant(best.perplexity),
            f"the source has {units.significant(found.measured.perplexity)}",
        ),
        ("Top-1 agreement", units.percent(best.top1_agreement), "same token ranked first"),
        ("KV cache", units.MISSING if kv is None else units.size(kv), "per token of context"),
        (
            "Tokens a second",
            units.MISSING if speed is None else units.significant(speed, 3),
            "one text in this engine, predicted",
        ),
    ]
    made = [best.command or best.path, *best.open_with]
    shown = [
        el(
            "div",
            el("h3", name),
            el("p", el("span", value, class_="after"), class_="value"),
            el("p", under, class_="under"),
            class_="card",
        )
        for name, value, under in cards
    ]
    blocks = [el("pre", block) for block in made]
    return section("winner", best.name, el("div", *shown, class_="cards thirds"), *blocks)


def _charts(found: Comparison) -> list[Node]:
    kl = Loss("KL divergence, nats a token", _kl, lambda x: x.on_kl_front, limit=found.wanted.kl)
    source = found.measured.perplexity
    perplexity = Loss(
        f"perplexity above the source's {units.significant(source, 4)}",
        lambda x: x.perplexity - source,
        lambda x: x.on_perplexity_front,
    )
    note = "Filled points are on the front: no other result is as small and better."
    return [
        section("kl", "Size and KL divergence", _figure(found, kl), note=note),
        section("perplexity", "Size and perplexity", _figure(found, perplexity)),
    ]


def _kl(one: Contender) -> float:
    return one.kl


def _figure(found: Comparison, loss: Loss) -> Html:
    return el(
        "figure",
        el("div", scatter(found, loss, WIDE), class_="plot wide"),
        el("div", scatter(found, loss, SLIM), class_="plot slim"),
    )


def _table(found: Comparison) -> Html:
    rows = [_row(found, one) for one in found.contenders]
    note = " ".join(filter(None, (measured(found), of_files(found), _speed(found))))
    shown = table("Results", _COLUMNS, rows, "sortable stack")
    return section("results", "All results", shown, note=note)


def _speed(found: Comparison) -> str:
    if found.speed_reason is not None:
        return f"No tokens a second: {found.speed_reason}."
    speed = found.measured.tokens_per_second
    return (
        "" if speed is None else f"The source is predicted {units.significant(speed, 3)} tokens/s."
    )


def _row(found: Comparison, one: Contender) -> list[Cell]:
    won = el("b", " winner") if one.name == found.winner else None
    on_front = el("span", " front", class_="badge") if one.on_kl_front else None
    kv, speed = one.kv_bytes_per_token, one.tokens_per_second
    return [
        Cell(join([one.name, won, on_front]), class_="kept" if won else None),
        number(one.bytes, units.size(one.bytes)),
        number(one.bits_per_weight, units.trimmed(one.bits_per_weight)),
        number(one.kl),
        number(one.perplexity, units.significant(one.perplexity, 4)),
        number(one.top1_agreement, units.percent(one.top1_agreement)),
        number(kv, None if kv is None else units.size(kv)),
        number(speed, None if speed is None else units.significant(speed, 3)),
    ]


def _notes(found: Comparison) -> Html | None:
    """Each line once, with all that say it."""
    said: dict[str, list[str]] = {}
    for one in found.contenders:
        for line in dict.fromkeys(one.notes):
            said.setdefault(line, []).append(one.name)
    pairs = [_said(line, names) for line, names in said.items()]
    return section("notes", "What the results say", facts(pairs)) if pairs else None


def _said(line: str, names: list[str]) -> tuple[str, Node]:
    """A line beside those that say it, in front of them where they are many."""
    listed = ", ".join(names)
    if len(names) <= _FEW:
        return listed, line
    return units.counted(len(names), "result"), f"{line}: {listed}"


def _left_out(found: Comparison) -> Html | None:
    if not found.left_out:
        return None
    rows: list[tuple[str, Node]] = [(left.name, left.reason) for left in found.left_out]
    return section("left-out", "Not compared", facts(rows))


def _environment(found: Comparison) -> Html:
    made: list[tuple[str, Node]] = [
        (one.name, el("code", one.command)) for one in found.contenders if one.command
    ]
    place: list[tuple[str, Node]] = [
        ("source", el("code", found.source.path)),
        ("sha256", el("code", found.source.sha256)),
        ("tokens", el("code", found.measured.sha256)),
        ("processor", found.machine.cpu),
        ("threads", str(found.machine.threads)),
        ("instructions", found.machine.isa),
        ("started", found.started),
        ("finished", found.finished),
        *((name, version) for name, version in found.versions.items()),
    ]
    body: list[Node] = [el("h3", "Commands"), facts(made)] if made else []
    return section("environment", "Made with", *body, el("h3", "Place"), facts(place))
