"""The stored points as tables.

python -m benchmarks.structure.table [GROUP ...]
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.quality.table import table
from benchmarks.structure.points import POINTS, Point
from benchmarks.structure.stored import load

HEAD = ("point", "MB", "perplexity", "of the source's", "KL", "top-1", "wikitext-2 KL", "s")


def columns(point: Point, found: dict[str, Any]) -> list[str]:
    """The cells of one line, in the order of HEAD."""
    mean, error = found["mean"], found["standard_error"]
    spread = f" ± {error['perplexity']:.3f}" if point.seeds > 1 else ""
    more = 100 * (mean["perplexity"] / found["perplexity_source"] - 1)
    return [
        point.name,
        f"{mean['bytes'] / 1e6:.2f}",
        f"{mean['perplexity']:.3f}{spread}",
        f"{more:+.1f} %",
        f"{mean['kl']:.4f}",
        f"{100 * mean['top1_agreement']:.1f} %",
        f"{found['wikitext2']['kl']:.3f}" if "wikitext2" in found else "",
        f"{mean['cpu_s']:.0f}",
    ]


def main(points: Sequence[Point] = POINTS, about: str | None = __doc__) -> None:
    groups = {point.group: point.file for point in points}
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(groups))
    options = parser.parse_args()
    if unknown := set(options.groups) - set(groups):
        parser.error(f"no group {sorted(unknown)}; there are {list(groups)}")
    for group in options.groups or groups:
        found = load(groups[group])
        lines = [columns(p, found[p.name]) for p in points if p.group == group and p.name in found]
        print(f"\n{group}\n")
        print(table([HEAD, *lines]))


if __name__ == "__main__":
    main()
