"""What is stored of a comparison: document, page and figures are of one run, and of no machine."""

import re
import struct
from dataclasses import replace

from benchmarks import compared
from benchmarks.compare import FIGURES, figures, in_clone, places
from benchmarks.processes import REPO, RESULTS, stored_result
from compress.report import units
from compress.report.comparison.page import render_page
from compress.report.comparison.records import Wanted
from helpers.pages.comparisons import comparison, contenders

STORED = stored_result(compared.NAME)
PAGE = (RESULTS / f"{compared.NAME}.html").read_text()
DOCUMENT = compared.DOCUMENT.read_text()


def test_the_document_has_the_stored_table() -> None:
    assert compared.document(DOCUMENT) == DOCUMENT
    table = re.findall(r"^\| `([\w-]+)`.*\| ([\d.]+ kB) \| ([\d,]+) \|", DOCUMENT, re.MULTILINE)
    assert table == [
        (
            one["name"],
            units.size(one["kv_bytes_per_token"]),
            f"{one['tokens_per_second']:,.0f}",
        )
        for one in STORED["results"]
    ]


def test_the_page_has_the_stored_figures() -> None:
    for one in STORED["results"]:
        assert set(one) == set(FIGURES)
        line = re.search(rf"<tr><th[^>]*>{one['name']}\b(?!-).*?</tr>", PAGE)
        assert line is not None, one["name"]
        for key in ("bytes", "kl", "perplexity", "kv_bytes_per_token", "tokens_per_second"):
            assert f'data-sort="{one[key]}"' in line[0], (one["name"], key)
    for name, reason in STORED["left_out"].items():
        assert name not in {one["name"] for one in STORED["results"]}
        assert f"<dt>{name}</dt>" in PAGE, reason


def test_nothing_tells_of_the_machine_it_was_made_on() -> None:
    for text in (PAGE, (RESULTS / f"{compared.NAME}.json").read_text()):
        assert places(text) == []
        assert str(REPO) not in text
    assert "http" not in PAGE.replace("http-equiv", "")


def test_the_picture_is_small_and_shown() -> None:
    picture = RESULTS / f"{compared.NAME}.png"
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) < 150_000
    assert struct.unpack(">II", data[16:24])[0] == 1000
    assert f"(../{picture.relative_to(REPO)})" in DOCUMENT


def test_paths_begin_at_the_clone() -> None:
    started = tuple(
        replace(one, path=f"{REPO}/out/best/{one.name}", open_with=(f"run {REPO}/out/best/x.gguf",))
        for one in contenders(3)
    )
    found = comparison(started, Wanted(kl=10.0))
    found = replace(found, source=replace(found.source, path=f"{REPO}/examples/tale-6m"))
    assert places(render_page(found)) != []
    moved = in_clone(found)
    assert places(render_page(moved)) == []
    assert moved.source.path == "examples/tale-6m"
    assert {one.open_with for one in moved.contenders} == {("run out/best/x.gguf",)}
    assert figures(moved) == figures(found)
    elsewhere = replace(found, source=replace(found.source, path="/home/somebody/model"))
    assert places(render_page(in_clone(elsewhere))) == ["/home/somebody/model"]
