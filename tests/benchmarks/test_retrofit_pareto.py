"""The page of perplexity over bytes of cache: it is what the stored results give."""

from xml.etree import ElementTree

from benchmarks.retrofit import pareto
from benchmarks.retrofit.pareto import Mark, best, family_of, marks, table
from benchmarks.retrofit.plot import COLOURS
from benchmarks.retrofit.points import POINTS
from benchmarks.structure.stored import load


def mark(label: str, per_token: float, perplexity: float) -> Mark:
    return Mark(label, "int8", "mla", False, per_token, {"perplexity": perplexity})


def test_what_another_beats_in_both_is_not_among_the_best() -> None:
    points = [mark("a", 100, 9.0), mark("b", 200, 8.0), mark("c", 200, 8.5), mark("d", 300, 8.0)]
    assert best(points) == {("a", "int8"), ("b", "int8")}
    assert [line.count("**") for line in table(points)] == [0, 0, 0, 2, 0, 2]


def test_every_point_has_a_colour() -> None:
    assert {family_of(point.label) for point in POINTS} <= COLOURS.keys()


def test_the_page_is_that_of_the_stored_results() -> None:
    found = load(pareto.FILE)
    page, drawn = ((pareto.HERE / name).read_text() for name in ("PARETO.md", "pareto.svg"))
    assert (page, drawn) == pareto.page(found)
    ElementTree.fromstring(drawn)
    for text in pareto.TEXTS:
        labels = {each.label for each in marks(found, text)}
        assert labels == found.keys()


def test_caches_of_eight_bits_take_half_and_what_scales_take() -> None:
    for point in load(pareto.FILE).values():
        sizes = point["bytes"]
        assert sizes["fp8"]["token"] * 2 == sizes["bf16"]["token"]
        assert sizes["fp8"]["token"] < sizes["int8"]["token"] < sizes["bf16"]["token"]
