"""What is measured: recipes of structural stages on tale-6m, in groups."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from benchmarks.processes import SHARED

SOURCE = SHARED / "models" / "tale-6m"
CALIBRATION = SHARED / "text" / "tinystories" / "tinystories_train.txt"
SAMPLES, LENGTH = 128, 256
TEACHER = "SOURCE"  # stands for the source's folder where it only teaches
TEXT = "TEXT"  # stands for the text of the calibration where a stage reads it again
Stage = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """A recipe. seeds: how many draws of calibration rows it is made from. samples: rows of each,
    of `length` tokens.
    like: the name of the point in the same group whose shape is trained from scratch; None for a
    recipe that changes the source. peer: auto-round makes it, from the same rows. study: whose
    benchmark it is. recipe: a built-in one, which is run as it is in place of `stages`."""

    group: str
    name: str
    stages: tuple[Stage, ...]
    seeds: int = 1
    like: str | None = None
    samples: int = SAMPLES
    peer: bool = False
    study: str = "structure"
    recipe: str = ""
    length: int = LENGTH

    @property
    def label(self) -> str:
        return f"{self.group}/{self.name}"

    @property
    def file(self) -> str:
        """Of the results of its group, in benchmarks/results."""
        return f"{self.study}_{self.group}.json"


# Of each share of the parameters: the sizes of every axis that leave at most so many, and the
# budget of the search over all of them. Heads alone cannot leave 60 %.
SIZES: Mapping[str, Mapping[str, Stage]] = MappingProxyType(
    {
        "80": {
            "ffn": {"method": "prune_width", "ffn": 500},
            "heads": {"method": "prune_width", "heads": 1},
            "hidden": {"method": "prune_width", "hidden": 204},
            "layers": {"method": "prune_depth", "layers": 4},
            "mix": {"method": "prune", "budget": {"params": 0.8}},
        },
        "60": {
            "ffn": {"method": "prune_width", "ffn": 232},
            "hidden": {"method": "prune_width", "hidden": 153},
            "layers": {"method": "prune_depth", "layers": 3},
            "mix": {"method": "prune", "budget": {"params": 0.6}},
        },
        "50": {
            "ffn": {"method": "prune_width", "ffn": 99},
            "hidden": {"method": "prune_width", "hidden": 128},
            "layers": {"method": "prune_depth", "layers": 2},
            "mix": {"method": "prune", "budget": {"params": 0.5}},
        },
    }
)
FEW = "300k"  # tokens of a short training
# What a study had +13 % perplexity for.
STUDIED = {"method": "prune_width", "hidden": 208}
# Of 80 %, where the search takes FFN channels alone: with an axis that it does not have.
WITH_HIDDEN = {"method": "prune_width", "hidden": 248, "ffn": 535}


def repairs(stage: Stage) -> Iterator[tuple[str, tuple[Stage, ...]]]:
    """The same sizes, mended in four ways."""
    train = {"method": "distill", "tokens": FEW}
    yield "none", ({**stage, "repair": "none"},)
    yield "closed form", (stage,)
    yield "block", (stage, {**train, "scope": "block"})
    yield "model", (stage, {**train, "scope": "model"})


def sizes() -> Iterator[Point]:
    for share, axes in SIZES.items():
        for axis, stage in axes.items():
            for repair, stages in repairs(stage):
                yield Point("sizes", f"{share} % {axis}, {repair}", stages)
    yield Point("sizes", "hidden 208, closed form", (STUDIED,))
    yield Point("sizes", "80 % hidden 248 and ffn 535, closed form", (WITH_HIDDEN,))


CHOICES = ("obs", "fluctuation", "taylor", "activation", "magnitude")
EQUAL: Mapping[str, Stage] = MappingProxyType({"ffn 512": {"ffn": 512}, "heads 4": {"heads": 4}})


def choices() -> Iterator[Point]:
    """What stays, by five measures at one size: as they are, and with our refit."""
    for name, sizes in EQUAL.items():
        for select in CHOICES:
            for repair in ("none", "drift"):
                stage = {"method": "prune_width", **sizes, "select": select, "repair": repair}
                yield Point("choices", f"{name} {select}, {repair}", (stage,), seeds=5)


def rounding() -> Iterator[Point]:
    """Fewer weights or fewer bits, at about equal bytes."""
    cut = {"method": "prune", "budget": {"params": 0.6}}
    train = {"method": "distill", "tokens": FEW, "scope": "model"}

    def gptq(bits: int) -> Stage:
        return {"method": "gptq", "scheme": f"W{bits}A16", "group_size": 128}

    yield Point("bytes", "8 bits", (gptq(8),))
    yield Point("bytes", "4 bits", (gptq(4),))
    yield Point("bytes", "3 bits", (gptq(3),))
    yield Point("bytes", "60 %, 8 bits", (cut, gptq(8)))
    yield Point("bytes", "60 %, trained, 8 bits", (cut, train, gptq(8)))
    yield Point("bytes", "60 %, trained, 4 bits", (cut, train, gptq(4)))
    small = {"method": "prune_width", "ffn": 512}
    yield Point("bytes", "FFN 512, 4 bits", (small, gptq(4)))
    yield Point("bytes", "FFN 512, trained, 4 bits", (small, train, gptq(4)))


# Two shapes of 60 % of the parameters. The first loses least while nothing is trained, the second
# learns most: with 200k tokens they came from KL 0.277 to 0.187, and from 0.275 to 0.156.
SHALLOW: tuple[Stage, ...] = (
    {"method": "prune_depth", "keep": [0, 1, 3, 4, 5]},
    {"method": "prune_width", "heads": 6, "ffn": 435},
)
NARROW: tuple[Stage, ...] = ({"method": "prune_width", "hidden": 208, "heads": 7, "ffn": 462},)


def long(rate: float) -> Stage:
    train = {"method": "distill", "tokens": "3M", "scope": "model", "optimizer": "muon"}
    return {**train, "batch": 4, "rate": rate, "every": 300}


def trained() -> Iterator[Point]:
    for name, shape, rate in (("shallow", SHALLOW, 1.5e-3), ("narrow", NARROW, 2e-3)):
        yield Point("trained", f"60 %, {name}", shape)
        yield Point("trained", f"60 %, {name}, 3M tokens", (*shape, long(rate)))
    for rate in (1e-3, 2e-3, 4e-3):  # 2e-3 is better than 4e-3
        stage = {**long(rate), "teacher": TEACHER}
        name = f"60 %, shallow, 3M tokens from scratch at {rate:g}"
        yield Point("trained", name, (stage,), like="60 %, shallow")


FEWER = 64  # rows, as auto-round was given


def tuned() -> Iterator[Point]:
    """Behind GPTQ, on its own rows: scales and norms, the rounding block by block, also by half the
    rows a step, and both; and what auto-round makes of these rows in 200 iterations."""
    gptq = {"method": "gptq", "scheme": "W4A16", "group_size": 128}
    own = {"method": "distill", "samples": FEWER, "sources": TEXT, "batch": 8}
    scales = {**own, "train": ["scales", "norms"], "scope": "model", "tokens": "32k", "every": 8}
    moved = ["rounding", "scales", "norms"]
    blocks = {**own, "train": moved, "scope": "block", "tokens": "184k", "every": 30}
    half = {**blocks, "batch": 4, "tokens": "84k", "every": 27}
    for name, stages in (
        ("GPTQ", (gptq,)),
        ("GPTQ, scales", (gptq, scales)),
        ("GPTQ, rounding", (gptq, blocks)),
        ("GPTQ, rounding, scales", (gptq, blocks, scales)),
        ("GPTQ, rounding by half", (gptq, half)),
    ):
        yield Point("tuned", name, stages, samples=FEWER)
    yield Point("tuned", "auto-round", (), samples=FEWER, peer=True)


def recipes() -> Iterator[Point]:
    """Built-in recipes as they come, on text that the model writes for itself."""
    for name in ("prune-80", "prune-60-distill", "prune-distill-int4"):
        yield Point("recipes", name, (), recipe=name)


POINTS = (*sizes(), *choices(), *rounding(), *trained(), *tuned(), *recipes())
