"""What structural stages cost and what mends it, point by point on tale-6m.

    python -m benchmarks.structure.run [--points sizes "bytes/4 bits" ...] [--work FOLDER] [--again]
    python -m benchmarks.structure.table

The retrofits of benchmarks/retrofit are measured in the same way.

A point is a recipe; a seed draws other rows of real text. Results are measured against the source
on the first 120 stories of TinyStories' test text and stored in benchmarks/results, point by point;
what is stored is not made again, and checkpoints stay in the work folder, so that a stopped run
goes on. Beside stands wikitext-2, for the first seed. Seconds are processor time of the whole
process.
"""

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.processes import REPO, RESULTS, package_versions, run, setting
from benchmarks.quality.results import locked, standard_error
from benchmarks.quality.rows import MODELS
from benchmarks.quality.tools import OUR_PACKAGES, Made, environment, measure, peer_python, slug
from benchmarks.structure.points import (
    CALIBRATION,
    POINTS,
    SOURCE,
    TEACHER,
    TEXT,
    Point,
)
from benchmarks.structure.stored import load, write

PEER, PEER_PACKAGES = "llm-compressor", ("auto-round", "torch", "transformers")
OF_TEXT = ("perplexity", "perplexity_source", "kl", "top1_agreement")
BESIDE = "wikitext2"
MEASURES = ("perplexity", "kl", "top1_agreement", "bytes", "cpu_s", "peak_rss_mb")


def make(point: Point, seed: int, work: Path) -> Made:
    """The checkpoint of a point from one draw of rows; one that is finished is taken as it is.

    RuntimeError with the last lines of the run where it fails.
    """
    out = folder_of(point, seed, work)
    cost = out / "cost.json"
    if not cost.is_file():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        command = peer_command(point, seed, out) if point.peer else our_command(point, seed, work)
        given = environment(PEER) if point.peer else None
        cost.write_text(json.dumps(asdict(run(command, out / "log", given))))
    return Made(out / "result", json.loads(cost.read_text()))


def our_command(point: Point, seed: int, work: Path) -> list[str]:
    out = folder_of(point, seed, work)
    named = point.recipe or str(out / "recipe.yaml")
    if not point.recipe:
        (out / "recipe.yaml").write_text(json.dumps(recipe(point, seed), indent=1))  # JSON is YAML
    model = SOURCE if point.like is None else scratch(point, out, work)
    words = ["run", named, "--model", str(model)]
    return [sys.executable, "-m", "compress.cli", *words, "--out", str(out / "result")]


def peer_command(point: Point, seed: int, out: Path) -> list[str]:
    """auto-round's script, which comes with llm-compressor; it is handed the rows, tokenized."""
    rows = out / "rows.safetensors"
    words = [str(SOURCE), str(CALIBRATION), str(rows), "--samples", str(point.samples)]
    words += ["--length", str(point.length), "--seed", str(seed)]
    run([sys.executable, "-m", "benchmarks.peers.rows", *words], out / "rows.log")
    script = REPO / "benchmarks" / "peers" / "autoround_run.py"
    asked = [str(SOURCE), str(out / "result"), "--rows", str(rows)]
    return [peer_python(PEER), str(script), *asked]


def folder_of(point: Point, seed: int, work: Path) -> Path:
    return work / slug(f"{point.group}-{point.name}") / str(seed)


def scratch(point: Point, out: Path, work: Path) -> Path:
    """A model in the shape of another point's result that has learned nothing."""
    (like,) = (x for x in POINTS if (x.group, x.name) == (point.group, point.like))
    shape, folder = make(like, 0, work).out, out / "scratch"
    command = [sys.executable, "-m", "benchmarks.structure.scratch", str(shape), str(folder)]
    run(command, out / "scratch.log")
    return folder


def recipe(point: Point, seed: int) -> dict[str, Any]:
    calibration = {
        "sources": [{"text": str(CALIBRATION)}],
        "samples": point.samples,
        "length": point.length,
    }
    named = {"teacher": {TEACHER: str(SOURCE)}, "sources": {TEXT: calibration["sources"]}}
    stages = [{k: named[k][v] if k in named else v for k, v in x.items()} for x in point.stages]
    return {"name": "structure", "seed": seed, "stages": stages, "calibration": calibration}


def versions_of(point: Point) -> dict[str, str]:
    if point.peer:
        return package_versions(peer_python(PEER), PEER_PACKAGES)
    return package_versions(sys.executable, OUR_PACKAGES)


def result_of(made: Made, quality: Mapping[str, float]) -> dict[str, float]:
    """One seed's numbers. bytes: of the weight files."""
    sizes = [path.stat().st_size for path in made.out.glob("*.safetensors")]
    costs = {"cpu_s": made.cost["cpu_s"], "peak_rss_mb": made.cost["peak_rss_bytes"] / 1e6}
    whole = {**quality, "bytes": float(sum(sizes)), **costs}
    return {name: round(whole[name], 5) for name in MEASURES}


def store(point: Point, made: list[Made]) -> None:
    qualities = measure(made, MODELS[0])
    runs = [result_of(one, q) for one, q in zip(made, qualities, strict=True)]
    found = {
        **setting(f"benchmarks.{point.study}.run"),
        "versions": versions_of(point),
        "stages": [dict(stage) for stage in point.stages],
        "perplexity_source": round(qualities[0]["perplexity_source"], 5),
        "mean": {n: round(statistics.fmean(r[n] for r in runs), 5) for n in MEASURES},
        "standard_error": {n: round(standard_error([r[n] for r in runs]), 5) for n in MEASURES},
        "by_seed": runs,
        BESIDE: beside(made[0]),
    }
    with locked(RESULTS / point.file):
        write(point.file, {**load(point.file), point.name: found})
    mean = found["mean"]
    tell(f"{point.label}: {mean['perplexity']:.3f}, KL {mean['kl']:.4f}, {mean['cpu_s']:.0f} s")


def beside(made: Made) -> dict[str, float]:
    """What a checkpoint loses on the other text."""
    (found,) = measure([made], MODELS[0], ["--wikitext"])
    return {name: round(found[name], 5) for name in OF_TEXT}


def add_beside(point: Point, work: Path) -> None:
    """Measure a stored point on the other text too, where its checkpoint is still there."""
    if (folder_of(point, 0, work) / "cost.json").is_file():
        found = beside(make(point, 0, work))
        with locked(RESULTS / point.file):
            stored = load(point.file)
            write(point.file, {**stored, point.name: {**stored[point.name], BESIDE: found}})


def wanted(point: Point, names: list[str]) -> bool:
    """Whether a point is named: "sizes" is a group, "bytes/4 bits" a point; no names are all."""
    return not names or point.group in names or point.label in names


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(points: Sequence[Point] = POINTS, about: str | None = __doc__) -> None:
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", nargs="+", default=[], metavar="GROUP[/NAME]")
    parser.add_argument("--work", type=Path, default=REPO / "out" / "structure")
    parser.add_argument("--again", action="store_true", help="make what is stored again too")
    options = parser.parse_args()
    for point in points:
        if not wanted(point, options.points):
            continue
        stored = load(point.file).get(point.name)
        try:
            if options.again or stored is None:
                store(point, [make(point, seed, options.work) for seed in range(point.seeds)])
            elif BESIDE not in stored:
                add_beside(point, options.work)
        except RuntimeError as error:  # the next points are worth having
            tell(f"{point.label}: FAILED: {str(error).strip()[-1500:]}")


if __name__ == "__main__":
    main()
