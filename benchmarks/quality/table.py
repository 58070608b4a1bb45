"""The stored results as tables: ours beside the other tool's, met or not.

    python -m benchmarks.quality.table [GROUP ...] [--failed]

A row is met when our mean perplexity is at most the peer's mean plus its standard error over the
calibration seeds (0 for what sees no data). "missing": we have no such method; "open": not made;
"fails": the peer refuses or breaks, with its words in the result.
--failed: print only rows that are not met, and exit with 1 when there are any.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.results import load
from benchmarks.quality.rows import GROUPS, MODELS, OURS, ROWS, Model, Row

Found = dict[str, Any]
HEAD = (
    "row",
    "ours ppl",
    "peer",
    "peer ppl",
    "met",
    "KL",
    "peer KL",
    "top-1",
    "peer",
    "bits",
    "peer",
    "s",
    "peer",
    "MB",
    "peer",
)


@dataclass(frozen=True, slots=True)
class Line:
    """A row on a model, with what is stored of it. missing: methods we do not have."""

    model: Model
    row: Row
    ours: Found | None
    peer: Found | None
    missing: tuple[str, ...]

    @property
    def met(self) -> bool | None:
        """None where one of the two is not there."""
        if self.ours is None or self.peer is None or "failed" in self.peer:
            return None
        bound = self.peer["mean"]["perplexity"] + self.peer["standard_error"]["perplexity"]
        return bool(self.ours["mean"]["perplexity"] <= bound)


def lines(groups: Sequence[str]) -> Iterator[Line]:
    """Every row of the groups on every model it is for, model by model."""
    from compress.methods import METHODS

    stored = {group: load(group)["models"] for group in groups}
    for model in MODELS:
        for row in ROWS:
            if row.group in groups and row.is_for(model):
                cells = stored[row.group].get(model.name, {}).get(row.name, {})
                peer = None if row.peer is None else cells.get(row.peer.tool)
                missing = tuple(m for m in row.methods if m not in METHODS)
                yield Line(model, row, cells.get(OURS), peer, missing)


def columns(line: Line) -> list[str]:
    """The cells of one line, in the order of HEAD."""
    ours, peer = line.ours, line.peer
    no_peer = "none" if line.row.peer is None else "open"
    missing = f"missing: {', '.join(line.missing)}" if line.missing else "open"
    first = [
        f"{line.row.group}/{line.row.name}",
        with_error(ours, "perplexity", 4) or missing,
        line.row.peer.tool if line.row.peer else "–",
        with_error(peer, "perplexity", 4) or no_peer,
        {None: "–", True: "yes", False: "NO"}[line.met],
    ]
    pairs = (
        ("kl", 4),
        ("top1_agreement", 4),
        ("bits_per_weight", 3),
        ("wall_s", 1),
        ("peak_rss_mb", 0),
    )
    rest = [mean(found, key, digits) for key, digits in pairs for found in (ours, peer)]
    return first + rest


def mean(found: Found | None, key: str, digits: int) -> str:
    return "–" if found is None or "failed" in found else f"{found['mean'][key]:.{digits}f}"


def with_error(found: Found | None, key: str, digits: int) -> str:
    if found is None:
        return ""
    if "failed" in found:
        return "fails"
    error = f" ± {found['standard_error'][key]:.{digits}f}" if found["seeds"] > 1 else ""
    return f"{found['mean'][key]:.{digits}f}{error}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns stand under each other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([padded[0], rule, *padded[1:]])


def source_perplexity(found: Sequence[Line]) -> str:
    values = {
        c["perplexity_source"]
        for line in found
        for c in (line.ours, line.peer)
        if c and "failed" not in c
    }
    return ", ".join(f"{value:.4f}" for value in sorted(values)) or "not measured"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--failed", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no group {sorted(unknown)}; there are {list(GROUPS)}")
    found = [
        line for line in lines(options.groups or GROUPS) if line.met is False or not options.failed
    ]
    for model in MODELS:
        of_model = [line for line in found if line.model == model]
        if of_model:
            print(f"\n{model.name}, source {source_perplexity(of_model)}\n")
            print(table([HEAD, *(columns(line) for line in of_model)]))
    if options.failed and found:
        sys.exit(1)


if __name__ == "__main__":
    main()
