"""One page of perplexity against the bytes that keys and values take, of everything measured.

    python -m benchmarks.retrofit.pareto

Reads benchmarks/results/retrofit_caches.json, which benchmarks.retrofit.caches fills, and writes
PARETO.md and pareto.svg beside this file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.retrofit.caches import FILE, ORIGIN
from benchmarks.retrofit.plot import Dot, panel, picture
from benchmarks.structure.stored import load

HERE = Path(__file__).resolve().parent
KINDS = ("bf16", "int8", "fp8")
# Text -> tokens of the text whose blocks are counted, what the panel is called, where it ends.
TEXTS = {
    "stories": ("256", "TinyStories, first 120 test stories", 20.0),
    "treasure": ("512", "Treasure Island, windows of the whole context of 512", 200.0),
}
INTRODUCTION = """# Perplexity against the bytes of keys and values

tale-6m and what retrofits make of it, each with three caches of the engine. Bytes are those of the
blocks that the engine's allocator gives out at once, at most, for one text of 256 tokens (stories)
or 512 (the novel), read 16 tokens at a time, over its tokens; layers with a window give back what
they have left behind. fp8 is counted as half of bf16: the engine rounds to it and stores no fp8.
Hollow marks are as the edit leaves a model, full ones are trained. Arithmetic is fp32 everywhere.

![Perplexity over bytes of cache a token](pareto.svg)

The config of tale-6m says 512 positions, but it loses its way behind 320: on the novel, whose
windows are as long as the context, the last two columns tell the positions before and behind that
apart. It has read no text but stories, so on the novel what counts is the distance from the source.

Points that no other beats in both are bold: fewest bytes for their perplexity. Perplexities above
the end of an axis are in the table alone.
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """One checkpoint with one cache on one text. family: what is drawn alike. trained: behind it.
    numbers: perplexity, and that of the positions before and behind 320."""

    label: str
    kind: str
    family: str
    trained: bool
    per_token: float
    numbers: Mapping[str, float]

    @property
    def perplexity(self) -> float:
        return self.numbers["perplexity"]


def family_of(label: str) -> str:
    """What a point is drawn as."""
    name = label.partition("/")[2]
    if label == ORIGIN or "TransMLA" in name:
        return ORIGIN if label == ORIGIN else "TransMLA's start"
    if "mla" in name:
        return "mla, stride" if "stride" in name else "mla"
    if "gqa" in name:
        return "gqa" if "pca" in name or "tokens" in name else "gqa, other pools"
    return "hybrid"


def marks(found: Mapping[str, Any], text: str) -> Iterator[Mark]:
    length = TEXTS[text][0]
    for label, point in found.items():
        trained = "tokens" in label or label.startswith("recipes/")
        for kind in KINDS:
            per_token = point["bytes"][kind][length] / int(length)
            numbers = point[text][kind]
            yield Mark(label, kind, family_of(label), trained, per_token, numbers)


def best(points: list[Mark]) -> set[tuple[str, str]]:
    """Those that no other beats in both."""
    front, lowest = set(), float("inf")
    for mark in sorted(points, key=lambda m: (m.per_token, m.perplexity)):
        if mark.perplexity < lowest:
            front.add((mark.label, mark.kind))
            lowest = mark.perplexity
    return front


def table(points: list[Mark]) -> Iterator[str]:
    split = all("before_320" in mark.numbers for mark in points)
    front = best(points)
    yield "| model | cache | bytes a token | perplexity |" + (" before 320 | behind |" * split)
    yield "|---|---|---|---|" + "---|---|" * split
    for mark in sorted(points, key=lambda m: (-m.per_token, m.perplexity)):
        shown = f"{mark.perplexity:.3f}"
        if (mark.label, mark.kind) in front:
            shown = f"**{shown}**"
        more = ("before_320", "behind_320") if split else ()
        rest = "".join(f" {mark.numbers[name]:.2f} |" for name in more)
        yield f"| {mark.label} | {mark.kind} | {mark.per_token:,.0f} | {shown} |{rest}"


def dots(points: list[Mark]) -> list[Dot]:
    return [Dot(m.per_token, m.perplexity, m.family, m.kind, m.trained) for m in points]


def page(found: Mapping[str, Any]) -> tuple[str, str]:
    """PARETO.md and pareto.svg of what is stored."""
    lines, panels = [INTRODUCTION], []
    for text, (_, title, highest) in TEXTS.items():
        points = list(marks(found, text))
        panels.append(panel(title, dots(points), highest))
        lines += [f"## {title}", "", *table(points), ""]
    dates = sorted({point["date"].partition(" ")[0] for point in found.values()})
    versions = next(iter(found.values()))["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines.append(f"Measured {' and '.join(dates)} by `benchmarks.retrofit.caches`, {named}.")
    return "\n".join(lines) + "\n", picture(panels)


def main() -> None:
    text, drawn = page(load(FILE))
    (HERE / "PARETO.md").write_text(text)
    (HERE / "pareto.svg").write_text(drawn)


if __name__ == "__main__":
    main()
