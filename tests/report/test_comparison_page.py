"""The page of a comparison: points where their numbers are, names that cover nothing."""

import random
import re
from dataclasses import replace
from html import unescape

import pytest

from compress.report.comparison.chart import (
    HEIGHT,
    SLIM,
    WIDE,
    Axis,
    Loss,
    axis,
    scatter,
)
from compress.report.comparison.page import render_page
from compress.report.comparison.places import Box
from compress.report.comparison.records import LeftOut, Wanted
from compress.report.comparison.table import render_comparison
from compress.report.comparison.words import of_files
from helpers.pages.comparisons import comparison, contenders

KL = Loss("KL divergence, nats a token", lambda x: x.kl, lambda x: x.on_kl_front)


@pytest.mark.parametrize("width", [WIDE, SLIM])
@pytest.mark.parametrize("seed", range(5))
def test_names_cover_neither_points_nor_each_other(width: int, seed: int) -> None:
    found = comparison(contenders(20, seed), Wanted(within=5_000_000, kl=0.05))
    shown = scatter(found, KL, width).text
    dots = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="5.0"', shown)
    names = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*class="name">([^<]+)<', shown)
    assert len(dots) == 20
    assert len(names) >= (15 if width == WIDE else 6)
    points = [Box(float(x) - 5, float(y) - 5, float(x) + 5, float(y) + 5) for x, y in dots]
    boxes = [
        Box(float(x), float(y) - 7, float(x) + 7 * len(name), float(y) + 7) for x, y, name in names
    ]
    for i, box in enumerate(boxes):
        assert box.left >= 0
        assert box.right <= width
        assert not any(map(box.meets, points)), names[i]
        assert not any(map(box.meets, boxes[:i])), names[i]


@pytest.mark.parametrize("width", [WIDE, SLIM])
@pytest.mark.parametrize("seed", range(5))
def test_limits_stand_where_no_point_and_no_name_is(width: int, seed: int) -> None:
    found = comparison(contenders(12, seed), Wanted(within=7_900_000, kl=0.9))
    shown = scatter(found, replace(KL, limit=0.9), width).text
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" dy="0.32em"[^>]*>([^<]+)</text>', shown)
    dots = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="5.0"', shown)
    points = [Box(float(x) - 5, float(y) - 5, float(x) + 5, float(y) + 5) for x, y in dots]
    boxes = {
        text: Box(float(x), float(y) - 7, float(x) + 7 * len(text), float(y) + 7)
        for x, y, text in texts
    }
    for limit in ("7.90 MB", "KL 0.9"):
        box = boxes.pop(limit)
        assert box.left >= 0
        assert box.right <= width
        assert not any(map(box.meets, points)), limit
        assert not any(map(box.meets, boxes.values())), limit


def test_names_of_a_column_stand_in_the_order_of_its_points() -> None:
    """As of recipes whose codes take one type of llama.cpp; the front's keep off the lines."""
    column = [
        replace(one, bytes=4_133_792, kl=kl, on_kl_front=False)
        for one, kl in zip(contenders(6), (0.026, 0.034, 0.038, 0.047, 0.051, 0.071), strict=True)
    ]
    ends = [
        replace(contenders(1)[0], name=name, bytes=size, kl=kl, on_kl_front=True)
        for name, size, kl in (("small", 3_200_000, 0.0508), ("good-enough", 4_590_000, 0.0037))
    ]
    far = replace(contenders(1)[0], name="far", bytes=9_100_000, kl=0.06, on_kl_front=False)
    found = comparison((*column, *ends, far), Wanted(within=5_000_000, kl=0.05))
    shown = scatter(found, replace(KL, limit=0.05)).text
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*class="name">([^<]+)<', shown)
    places = {name: (float(x), float(y)) for x, y, name in texts}
    dots = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="5.0"', shown)
    column_at = float(dots[0][0])
    for right in (True, False):
        beside = [places[one.name] for one in column]
        heights = [y for x, y in beside if (x > column_at) == right]
        assert len(heights) >= 2
        assert heights == sorted(heights, reverse=True)
    first, last = ((float(x), float(y)) for x, y in dots[-3:-1])
    drawn = re.findall(
        r'<line x1="([\d.]+)" x2="([\d.]+)" y1="([\d.]+)" y2="([\d.]+)" class="limit"', shown
    )
    limits = [((float(a), float(c)), (float(b), float(d))) for a, b, c, d in drawn]
    assert len(limits) == 2
    for name in ("small", "good-enough"):
        x, y = places[name]
        box = Box(x, y - 7, x + 7 * len(name), y + 7)
        assert not any(map(box.crossed_by, [(first, last), *limits]))


@pytest.mark.parametrize("seed", range(20))
def test_what_crosses_a_box(seed: int) -> None:
    """Where a walk along the line steps into the box it is crossed, and nowhere else."""
    draw = random.Random(seed)
    box, wider = Box(10, 20, 60, 35), Box(9.9, 19.9, 60.1, 35.1)
    for _ in range(20):
        line = ((draw.uniform(0, 80), draw.uniform(0, 60)), (draw.choice((30, 70, 5)), 27.0))
        (x, y), (x_end, y_end) = line
        steps = [i / 2000 for i in range(2001)]
        spots = [Box(*2 * (x + (x_end - x) * t, y + (y_end - y) * t)) for t in steps]
        if any(box.left < s.left < box.right and box.top < s.top < box.bottom for s in spots):
            assert box.crossed_by(line)
        if box.crossed_by(line):
            assert any(map(wider.holds, spots))
    assert not box.crossed_by(((0, 10), (80, 10)))
    assert box.crossed_by(((0, 27), (80, 27)))
    assert box.crossed_by(((30, 0), (30, 60)))
    assert not box.crossed_by(((5, 0), (5, 60)))


def test_a_line_that_many_results_have_is_there_once() -> None:
    many, few = "embeddings are in Q8_0", "no code changes"
    noted = [
        replace(one, notes=(many, few) if i < 2 else (many,)) for i, one in enumerate(contenders(5))
    ]
    page = render_page(comparison(tuple(noted), Wanted()))
    assert page.count(many) == page.count(few) == 1
    names = [one.name for one in noted]
    assert f"<dt>5 results</dt><dd>{many}: {', '.join(names)}</dd>" in page
    assert f"<dt>{', '.join(names[:2])}</dt><dd>{few}</dd>" in page


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["gguf", "gguf"], "Sizes and losses are those of the GGUF files."),
        (["onnx", "onnx"], "Sizes are those of the onnx files, losses those of the checkpoints."),
        (["checkpoint", "gguf"], ""),
        (["checkpoint", "checkpoint"], ""),
    ],
)
def test_whose_numbers_they_are(files: list[str], said: str) -> None:
    pairs = zip(contenders(2), files, strict=True)
    found = comparison(tuple(replace(one, file=file) for one, file in pairs), Wanted())
    assert of_files(found) == said
    for shown in (render_page(found), " ".join(render_comparison(found).split())):
        assert ("Sizes" in shown) == bool(said)
        assert said in shown


def test_what_starts_the_winner_is_there_to_be_copied() -> None:
    lines = ("llama-cli -m best/model.gguf", "llama-server -m best/model.gguf")
    made = [replace(one, open_with=lines, command="compress-model run it") for one in contenders(3)]
    found = comparison(tuple(made), Wanted(kl=10.0))
    shown, page = render_comparison(found), render_page(found)
    assert "Start it\n  " + "\n\n  ".join(lines) + "\n" in shown
    for line in (*lines, "compress-model run it"):
        assert f"<pre>{line}</pre>" in page


def test_reasons_stand_beside_names() -> None:
    left = tuple(LeftOut(f"a-recipe-{i}", "words " * 30) for i in range(3))
    shown = render_comparison(replace(comparison(contenders(2), Wanted()), left_out=left))
    assert all(len(line) <= 80 for line in shown.splitlines())
    listed = shown.partition("Not compared\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed if not line.startswith("   ")] == [
        each.name for each in left
    ]


def test_an_axis_keeps_order_and_its_ticks_are_on_it() -> None:
    for values in ([4.2, 4.7, 7.2], [0.0003, 0.1, 0.35], [5.0], [1.0, 1.0], [0.0, 3.0, 2.0]):
        found: Axis = axis(values, HEIGHT - 40, 10, "size")
        places = [found.at(x) for x in sorted(values)]
        assert places == sorted(places, reverse=True)
        assert all(10 <= place <= HEIGHT - 40 for place in places)
        assert found.ticks()
        assert all(found.low <= tick <= found.high for tick in found.ticks())
        assert found.log == (max(values) >= 5 * min(x for x in values if x))
        assert found.title == ("size (log)" if found.log else "size")


def test_the_page_says_it_all_and_escapes_what_it_quotes() -> None:
    found = comparison(contenders(8), Wanted("llama.cpp", 7_000_000, 0.5))
    page = render_page(found)
    assert "<b>tale" not in page
    assert "<i>no" not in page
    assert "for llama.cpp within 7.00 MB with KL of 0.5 or less" in page
    for one in found.contenders:
        assert page.count(f">{one.name}") >= 2
    assert "no table has this decoder" in page
    assert "groups of 16 are <i>no</i> blocks" in unescape(page)


def test_nothing_to_show_is_a_page_too() -> None:
    found = comparison((), Wanted(kl=0.1))
    assert "Nothing is left to be the smallest with KL of 0.1 or less." in render_page(found)
    assert "Not compared\n  odd " in render_comparison(found)
