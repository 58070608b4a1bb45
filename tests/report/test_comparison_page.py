"""The page of a comparison: points where their numbers are, names that cover nothing."""

import random
import re
from html import unescape

import pytest

from compress.report.comparison.chart import (
    HEIGHT,
    SLIM,
    WIDE,
    Axis,
    Box,
    Loss,
    axis,
    scatter,
)
from compress.report.comparison.page import render_page
from compress.report.comparison.records import (
    Comparison,
    Contender,
    LeftOut,
    Measuring,
    Wanted,
    by_size,
    chosen,
    front,
)
from compress.report.comparison.table import render_comparison
from compress.report.schema import Machine, Source

KL = Loss("KL divergence, nats a token", lambda x: x.kl, lambda x: x.on_kl_front)


def contenders(count: int, seed: int = 0) -> tuple[Contender, ...]:
    draw = random.Random(seed)
    made = []
    for i in range(count):
        size, kl = draw.randrange(4_000_000, 8_000_000), 10 ** draw.uniform(-4, 0)
        made.append(
            Contender(
                f"recipe-{i}", f"out/{i}", size, "checkpoint", 4.25, kl, 8.8 + kl, 0.9, 12_288
            )
        )
    names = front((x.name, x.bytes, x.kl) for x in made)
    return tuple(Contender(**{**_fields(x), "on_kl_front": x.name in names}) for x in by_size(made))


def _fields(one: Contender) -> dict[str, object]:
    return {name: getattr(one, name) for name in Contender.__dataclass_fields__}


def comparison(found: tuple[Contender, ...], wanted: Wanted) -> Comparison:
    winner = chosen(found, wanted)
    return Comparison(
        "compress-model",
        {"torch": "2"},
        Source("models/<b>tale</b>", "ab" * 32, 6_000_000, 12_300_000),
        Measuring("self", 8160, "cd" * 32, 8.75, settings={"sampled_with_seed": 1}),
        wanted,
        found,
        (LeftOut("odd", "groups of 16 are <i>no</i> blocks"),),
        Machine("a processor", 2, 8_000_000_000, "AVX512"),
        "2026-01-01T00:00:00+00:00",
        "2026-01-01T00:01:00+00:00",
        None if winner is None else winner.name,
        "no table has this decoder",
    )


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
    assert "Not compared: odd" in render_comparison(found)
