"""What is measured: ways to a smaller cache on tale-6m, which has 8 heads of keys and values."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.structure.points import TEXT, Point, Stage

SEEDS = 5  # draws of rows of what the product claims; one of what it is compared with
GROUPS = (4, 2, 1)


def gqa() -> Iterator[Point]:
    """Heads that share keys and values, not trained: ours, and what others pool them by."""
    for groups in GROUPS:
        for pool, repair in (
            ("pca", "drift"),
            ("pca", "none"),
            ("align", "drift"),
            ("align", "none"),
            ("mean", "drift"),
            ("mean", "none"),
            ("first", "none"),
        ):
            stage: Stage = {"method": "gqa", "groups": groups, "pool": pool, "repair": repair}
            seeds = SEEDS if (pool, repair) == ("pca", "drift") else 1
            yield _point("gqa", f"gqa {groups}, {pool}, {repair}", (stage,), seeds)


def repaired() -> Iterator[Point]:
    """The same, trained: up to 2M tokens of the text that the calibration is of."""
    stage: Stage = {"method": "gqa", "groups": 4}
    train: Stage = {"method": "distill", "tokens": "2M", "scope": "model", "optimizer": "muon"}
    few = {**train, "sources": TEXT, "rate": 1e-3, "every": 300}
    yield _point("repaired", "gqa 4, 2M tokens", (stage, few), 1)


GLOBAL = (1, 2, 3)  # of 6 layers
# A quarter of the rows each: of the context, and of what the source was trained to read, as beyond
# 320 tokens it loses its way.
WINDOWS = {128: 512, 64: 256}


def hybrid() -> Iterator[Point]:
    """Windows in all but some layers, not trained and trained."""
    train: Stage = {"method": "distill", "tokens": "300k", "scope": "model", "optimizer": "muon"}
    for window, length in WINDOWS.items():
        for count in GLOBAL:
            stage: Stage = {"method": "hybrid", "window": window, "global": count}
            for name, stages in (("not trained", (stage,)), ("300k tokens", (stage, train))):
                point = _point("hybrid", f"{window}, {count} of 6 global, {name}", stages, 1)
                yield replace(point, length=length)


def recipes() -> Iterator[Point]:
    """Built-in recipes as they come, on text that the model writes for itself."""
    yield replace(_point("recipes", "long-context-hybrid", (), 1), recipe="long-context-hybrid")


def _point(group: str, name: str, stages: tuple[Stage, ...], seeds: int) -> Point:
    return Point(group, name, stages, seeds, study="retrofit")


POINTS = (*gqa(), *repaired(), *hybrid(), *recipes())
