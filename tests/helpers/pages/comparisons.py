"""A comparison of recipes that never ran: sizes and losses drawn from a seed."""

import random

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
from compress.report.schema import Machine, Source


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
