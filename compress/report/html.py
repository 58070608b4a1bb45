"""One self-contained HTML page, drawn from a report alone.

The content-security policy names the hashes of our own style and script and allows nothing else:
no request leaves the page, and markup in a model's name or text could not run even if it were
not escaped.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from compress.report.bars import sizes
from compress.report.cards import cards, sentence, title
from compress.report.chart import errors
from compress.report.codec import Writer, write_whole
from compress.report.layers import layers
from compress.report.markup import Html, Node, el, raw
from compress.report.parts import facts, section
from compress.report.quality import quality, samples
from compress.report.schema import Report
from compress.report.sections import (
    calibration,
    copied,
    environment,
    exports,
    model,
    notes,
    opening,
    plan,
    recipe,
    speed,
    stages,
    warnings,
)
from compress.report.structure import courses, repairs, searched
from compress.report.summary import model_name

_DECIMAL = "sizes are decimal: 1 MB is a million bytes"


def render_html(report: Report) -> str:
    """The page as text; it needs no other file and no network, and reads without JavaScript."""
    foot = f"{report.tool} · {_DECIMAL}"
    return page(f"{model_name(report)} · compress-model", title(report), _body(report), foot)


def export_page(
    name: str,
    tool: str,
    told: Sequence[tuple[str, Node]],
    start: Sequence[str],
    *more: Node,
) -> bytes:
    """The page of an export, as bytes of UTF-8.

    name: of the source. told: facts, of which one without a name goes on with the one before it.
    start: blocks to copy, each by itself. more: sections behind these.
    """
    heading = el("div", el("p", "Export", class_="eyebrow"), el("h1", name))
    shown = section("export", "What was written", facts(list(told)))
    blocks = section("start", "Start it", *(el("pre", block) for block in start))
    foot = f"{tool} · {_DECIMAL}"
    whole = page(
        f"{name} · compress-model", heading, [shown, blocks if start else None, *more], foot
    )
    return whole.encode("utf-8", errors="replace")


def page(name: str, heading: Html, body: Sequence[Node], foot: str) -> str:
    """A whole page as text. name: of the tab. body: what lies between heading and foot."""
    style, script = _asset("page.css"), _asset("page.js")
    toggle = el("button", "Dark", type="button", id="theme", hidden=True)
    shown = el(
        "body",
        el("header", heading, toggle),
        el("main", *body),
        el("footer", foot),
        el("script", raw(script)),
    )
    whole = el("html", _head(name, style, script), shown, lang="en")
    return f"<!doctype html>\n{whole.text}\n"


def write_html(report: Report, path: str | Path, write: Writer | None = None) -> None:
    """Write the page; the file appears whole or not at all. write: what puts bytes in a file."""
    (write or write_whole)(Path(path), render_html(report).encode("utf-8", errors="replace"))


def _asset(name: str) -> str:
    return (files("compress.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _head(name: str, style: str, script: str) -> Html:
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)};"
        " base-uri 'none'; form-action 'none'"
    )
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        raw('<link rel="icon" href="data:,">'),
        el("title", name),
        el("style", raw(style)),
    )


def _body(report: Report) -> list[Node]:
    return [
        sentence(report),
        cards(report),
        warnings(report),
        quality(report),
        samples(report),
        opening(report),
        notes(report),
        model(report),
        searched(report),
        repairs(report),
        courses(report),
        sizes(report),
        errors(report),
        plan(report),
        layers(report),
        exports(report),
        speed(report),
        stages(report),
        calibration(report),
        recipe(report),
        copied(report),
        environment(report),
    ]
