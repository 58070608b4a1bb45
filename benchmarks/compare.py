"""Built-in recipes compared on one model: the figures, the page and the picture of docs/compare.md.

    python -m benchmarks.compare examples/tale-6m out/best [--for llama.cpp] [--within 5MB]
        [--kl 0.05] [--trainings]

stores compare_MODEL.json, .html and .png in benchmarks/results, and of tale-6m writes what
docs/compare.md says of it. Nothing is taken from the user's cache, so that the time is that of a
first comparison. The picture needs Chromium.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import compared
from benchmarks.processes import REPO, RESULTS, busy_seconds, setting, write_result
from compress.byte_sizes import byte_size
from compress.report.comparison.page import render_page
from compress.report.comparison.records import Comparison
from compress.report.comparison.table import render_comparison
from compress.verbs import CompareOptions, RunOptions, compare

FIGURES = (
    *("name", "bytes", "file", "bits_per_weight", "kl", "perplexity", "top1_agreement"),
    *("kv_bytes_per_token", "tokens_per_second", "on_kl_front", "on_perplexity_front"),
)
# The page down to its first chart. Light, whatever the machine prefers.
SHOT = ("--window-size=1000,1416", "--blink-settings=preferredColorScheme=1")
BROWSER = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


def figures(found: Comparison) -> dict[str, Any]:
    """Without paths, which are of one machine."""
    return {
        "winner": found.winner,
        "source": {
            "bytes": found.source.bytes,
            "perplexity": found.measured.perplexity,
            "tokens_per_second": found.measured.tokens_per_second,
        },
        "tokens": found.measured.tokens,
        "results": [{key: getattr(one, key) for key in FIGURES} for one in found.contenders],
        "left_out": {left.name: left.reason for left in found.left_out},
    }


def in_clone(value: Any) -> Any:
    """A record whose paths begin at the clone, wherever it lies."""
    if isinstance(value, str):
        return value.replace(f"{REPO}/", "")
    if isinstance(value, tuple):
        return tuple(map(in_clone, value))
    if isinstance(value, Mapping):
        return {key: in_clone(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{x.name: in_clone(getattr(value, x.name)) for x in fields(value)})
    return value


def places(page: str) -> list[str]:
    """Absolute paths in what a page says, which are of one machine."""
    text = re.sub(r"<(style|script)\b.*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)
    return re.findall(r"(?<![\w.])/[\w.-]+/[\w./-]*", text)


def picture(page: Path, target: Path) -> None:
    """What a browser shows of the page, as PNG; where there is none it says so."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"no chromium: {target.name} is that of an earlier page", file=sys.stderr)
        return
    with TemporaryDirectory() as profile:
        flags = (*BROWSER, *SHOT, f"--user-data-dir={profile}", f"--screenshot={target}")
        subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True)


def store(found: Comparison, name: str, spent: Mapping[str, float]) -> None:
    """Figures, page and picture, unless they tell a place of this machine."""
    found = in_clone(found)
    told, page = figures(found), render_page(found)
    left = places(json.dumps(told) + page)
    if left:
        sys.exit(f"{', '.join(left)}: nothing is stored; work in the clone, with relative paths")
    write_result(name, {"setting": setting("benchmarks.compare"), "spent": spent, **told})
    place = RESULTS / f"{name}.html"
    place.write_text(page)
    picture(place, place.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--for", dest="runtime")
    parser.add_argument("--within", type=byte_size)
    parser.add_argument("--kl", type=float)
    parser.add_argument("--trainings", action="store_true")
    options = parser.parse_args()
    asked = CompareOptions(
        options.runtime, within=options.within, kl=options.kl, trainings=options.trainings
    )
    began, processor, busy = time.perf_counter(), time.process_time(), busy_seconds()
    found = compare(options.model, options.out, asked=asked, options=RunOptions(cache=False))
    spent = {
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(time.process_time() - processor, 1),
        "machine_busy_s": round(busy_seconds() - busy, 1),
    }
    print(render_comparison(found, options.out / "compare.html"))
    name = f"compare_{options.model.name}"
    store(found, name, spent)
    if name == compared.NAME:
        compared.main()


if __name__ == "__main__":
    main()
