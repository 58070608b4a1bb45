"""What the cache saves: a second recipe on one model, with what the first one kept and without.

    python -m benchmarks.cache examples/tale-6m --rounds 3 --recipes int4-awq int4-gptq-channel

Whole processes. In each round `first` runs into an empty cache, then every other recipe with what
that kept and, in turn, with --no-cache; and the files of both results are compared, report aside.
Processor time is what counts: other programs change it least.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import Cost, run, setting, write_result
from compress.usercache.place import SETTING, cache_folder, made_folder

FIRST, OTHERS = "int4-gptq", ("int4-awq",)


def one(recipe: str, model: Path, out: Path, cache: Path, *, kept: bool) -> Cost:
    """A run, start to end."""
    command = [sys.executable, "-m", "compress.cli", "run", recipe]
    command += ["--model", str(model), "--out", str(out)] + ([] if kept else ["--no-cache"])
    # Compiled kernels lie in the user's own cache: only what is measured has a folder of its own.
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), SETTING: "2GB"}
    return run(command, out.with_suffix(".log"), environment)


def files(out: Path) -> dict[str, str]:
    """Name -> sha256 of all files but those of the report."""
    found = (path for path in sorted(out.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
        if path.relative_to(out).parts[0] != "report"
    }


def compiled(cache: Path) -> None:
    """The user's kernels, so that no measured process compiles them."""
    kept = shutil.ignore_patterns(made_folder().name)
    shutil.copytree(cache_folder(), cache / cache_folder().name, ignore=kept)


def measured(model: Path, recipes: Sequence[str], rounds: int) -> dict[str, Any]:
    costs: dict[str, list[Cost]] = {}
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            compiled(folder)
            found = one(FIRST, model, folder / "first", folder, kept=True)
            costs.setdefault(FIRST, []).append(found)
            for recipe in recipes:
                sides = [True, False] if turn % 2 else [False, True]
                for kept in sides:
                    label = f"{recipe}, {'kept' if kept else 'alone'}"
                    out = folder / f"{recipe}-{kept}"
                    costs.setdefault(label, []).append(one(recipe, model, out, folder, kept=kept))
                same = files(folder / f"{recipe}-True") == files(folder / f"{recipe}-False")
                if not same:
                    sys.exit(f"{recipe} wrote other bytes with the cache than without")
    return {
        label: {
            "cpu_s": [round(x.cpu_s, 2) for x in each],
            "wall_s": [round(x.wall_s, 2) for x in each],
            "others": [round(x.others, 2) for x in each],
        }
        for label, each in costs.items()
    }


def ratios(runs: dict[str, Any], recipes: Sequence[str]) -> dict[str, float]:
    """Processor time alone over that with what was kept, medians."""
    return {
        recipe: round(
            statistics.median(runs[f"{recipe}, alone"]["cpu_s"])
            / statistics.median(runs[f"{recipe}, kept"]["cpu_s"]),
            2,
        )
        for recipe in recipes
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recipes", nargs="+", default=OTHERS)
    options = parser.parse_args()
    runs = measured(options.model, options.recipes, options.rounds)
    faster = ratios(runs, options.recipes)
    found = {"setting": setting("benchmarks.cache"), "runs": runs, "times_faster": faster}
    write_result("cache", found)


if __name__ == "__main__":
    main()
