"""What is measured: ways to a smaller cache on tale-6m, which has 8 heads of keys and values."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

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


SHARES = (0.5, 0.25, 0.125)  # of the source's cache

OTHERS: Mapping[str, Stage] = MappingProxyType(  # what others begin a latent with
    {
        "TransMLA's start": {"start": "transmla"},
        "TransMLA's start, FreqFold 2": {"start": "transmla", "freqfold": 2},
        "CARE's start": {"start": "care"},
        "SVD of weights": {"start": "svd"},
    }
)
MORE: Mapping[str, Stage] = MappingProxyType(  # the same, in a quarter of the cache alone
    {
        "TransMLA's start, FreqFold 4": {"start": "transmla", "freqfold": 4},
        "CARE's start, FreqFold 2": {"start": "care", "freqfold": 2},
    }
)


def mla() -> Iterator[Point]:
    """Keys and values as one latent, not trained: all of it, which loses what 16 bits lose; what a
    budget leaves, by frequencies that are chosen, with and without a refit; by plain ones; and by
    what others begin with, without a refit."""
    whole: Stage = {"method": "mla", "rank": 1.0, "rope_dim": 1.0}
    yield _point("mla", "mla whole", (whole,), 1)
    for share in SHARES:
        for rope, repair in (("any", "drift"), ("any", "none"), ("stride", "drift")):
            stage: Stage = {"method": "mla", "kv_bytes": share, "rope": rope, "repair": repair}
            seeds = SEEDS if repair == "drift" else 1
            yield _point("mla", f"mla {share:g}, {rope}, {repair}", (stage,), seeds)
        others = {**OTHERS, **(MORE if share == 0.25 else {})}
        for name, start in others.items():
            other = {"method": "mla", "kv_bytes": share, "rope": "stride", **start}
            yield _point("mla", f"mla {share:g}, {name}", ({**other, "repair": "none"},), 1)


# How long each is trained, and how fast: two to three times what follows from the damage. At 6e-4 a
# quarter of the cache is worse after 77k tokens (held-out KL 0.096) than at the start (0.064).
TRAINED: Mapping[str, tuple[Stage, str, float]] = MappingProxyType(
    {
        "mla 0.5": ({"method": "mla", "kv_bytes": 0.5}, "1M", 1e-4),
        "mla 0.25": ({"method": "mla", "kv_bytes": 0.25}, "1M", 2e-4),
        "mla 0.125": ({"method": "mla", "kv_bytes": 0.125}, "2M", 4e-4),
        "gqa 4": ({"method": "gqa", "groups": 4}, "2M", 3e-4),
        "gqa 2": ({"method": "gqa", "groups": 2}, "300k", 6e-4),
    }
)


def repaired() -> Iterator[Point]:
    """The same, trained on text that the calibration is of."""
    train: Stage = {"method": "distill", "scope": "model", "optimizer": "muon"}
    for name, (stage, tokens, rate) in TRAINED.items():
        few = {**train, "tokens": tokens, "sources": TEXT, "batch": 4, "every": 300, "rate": rate}
        yield _point("repaired", f"{name}, {tokens} tokens", (stage, few), 1)


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
    for name in ("gqa-uptrain", "mla-retrofit", "mla-int4", "long-context-hybrid"):
        yield replace(_point("recipes", name, (), 1), recipe=name)


def _point(group: str, name: str, stages: tuple[Stage, ...], seeds: int) -> Point:
    return Point(group, name, stages, seeds, study="retrofit")


POINTS = (*gqa(), *mla(), *repaired(), *hybrid(), *recipes())
