"""Whether smaller is faster: the result of each built-in recipe beside its source, in the engine.

    python -m benchmarks.runtime.smaller 400m --work FOLDER [--recipes NAME ...] [--batches 1 8 64]
        [--together 4]

Recipes run on few tokens, as speed depends on what is stored and not on how well; their results
stay in --work, and are taken from there the next time. Engines open as users open them who ask for
nothing but --dtype; the two take turns, or with --together as many results as it says and their
source, which is then measured once for all of them. ratios are the result's tokens a second over
those of the source, by batch: `decode` behind the first token of all texts, by wall time and by
processor time (`decode_by_cpu`), `prefill` of prompts. The result goes to benchmarks/results,
recipe by recipe.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import SHAPES, make
from benchmarks.processes import REPO, RESULTS, SHARED, run, threads_suffix, write_result
from benchmarks.runtime.batches import Batch, Serve, engine_side, in_turn
from benchmarks.runtime.setting import setting
from benchmarks.runtime.speed import DTYPES
from compress.recipe import builtin_names, load

SOURCE = "source"
TEXT = SHARED / "text" / "novels" / "Doyle_Hound_1902.txt"
PROMPT = 32
OUTPUTS = {1: 48, 8: 32, 64: 16}
TOKENS = 256  # of a training: one step
WINDOW = 16  # of hybrids; rows of calibration are four times as long


def made(name: str, model: Path, work: Path) -> Path:
    """The result of a recipe, if need be by a run on few tokens."""
    out = work / name
    if not out.exists():
        words = [word for each in few_tokens(name) for word in ("--set", each)]
        command = [sys.executable, "-m", "compress.cli", "run", name, "--model", str(model)]
        run([*command, "--out", str(out), *words], work / f"{name}.log")
    return out


def few_tokens(name: str) -> Iterator[str]:
    """Overrides that make a run short."""
    recipe = load(name)
    if recipe.calibration is not None:
        yield f"calibration.sources={json.dumps([{'text': str(TEXT)}])}"
        yield from ("calibration.samples=8", f"calibration.length={4 * WINDOW}")
    for edit in recipe.edits:
        if edit.method == "distill":
            yield f"stages[{edit.index}].tokens={TOKENS}"
        if edit.method == "hybrid":
            yield from (f"stages[{edit.index}].{key}" for key in (f"window={WINDOW}", "global=1"))
    yield "evaluation=null"
    if recipe.export:
        yield "export=null"


def measure(
    sides: Mapping[str, Serve], batches: Sequence[int], rounds: int
) -> dict[str, dict[str, Any]]:
    """By side: its tokens a second by batch, and the ratios to the source's."""
    by_batch = {
        texts: in_turn(sides, Batch(texts, PROMPT, OUTPUTS[texts]), rounds) for texts in batches
    }
    found: dict[str, dict[str, Any]] = {name: {"batches": {}, "ratios": {}} for name in sides}
    for texts, of in by_batch.items():
        for name, rates in of.items():
            found[name]["batches"][texts] = rates
            found[name]["ratios"][texts] = {
                kind: round(rate / of[SOURCE][kind], 3) for kind, rate in rates.items()
            }
    return found


def batched(names: Iterable[str], count: int) -> Iterator[list[str]]:
    """So many names at a time."""
    rest = iter(names)
    while group := list(islice(rest, count)):
        yield group


def source_of(name: str, work: Path) -> Path:
    if name not in SHAPES:
        return REPO / "examples" / name
    if not (work / name).exists():
        make(work / name, SHAPES[name])
    return work / name


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["tale-6m", "400m"])
    parser.add_argument("--work", type=Path, required=True, help="where results of recipes stay")
    parser.add_argument("--recipes", nargs="+", choices=builtin_names(), default=builtin_names())
    parser.add_argument("--batches", type=int, nargs="+", choices=OUTPUTS, default=[*OUTPUTS])
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="one more, not counted, comes first")
    parser.add_argument("--together", type=int, default=1, help="results that take turns")
    parser.add_argument("--make", action="store_true", help="run the recipes, and measure nothing")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    model, file = source_of(options.model, options.work), _file(options)
    results = {name: made(name, model, options.work) for name in options.recipes}
    if options.make:
        return
    path, dtype = RESULTS / f"{file}.json", DTYPES[options.dtype]
    found = json.loads(path.read_text()) if path.exists() else {}
    source, _ = engine_side(model, dtype=dtype)
    for names in batched(results, options.together):
        sides = {name: engine_side(results[name], dtype=dtype) for name in names}
        serves = {SOURCE: source, **{name: serve for name, (serve, _) in sides.items()}}
        of = measure(serves, options.batches, options.rounds)
        how = {**setting("benchmarks.runtime.smaller"), "rounds": options.rounds}
        for name, (_, math) in sides.items():
            found[name] = {**how, "math": math, SOURCE: of[SOURCE]["batches"], **of[name]}
            print(name, math, json.dumps(of[name]["ratios"]), flush=True)
        write_result(file, dict(sorted(found.items())))


def _file(options: argparse.Namespace) -> str:
    suffix = threads_suffix(options.threads)
    return f"runtime_smaller_{options.model}_{options.dtype}{suffix}"


if __name__ == "__main__":
    main()
