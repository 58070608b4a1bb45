"""Our 4-bit graph beside the one that onnxruntime-genai's own builder makes of the same source.

    python -m benchmarks.export.genai_speed tale-6m
    python -m benchmarks.export.genai_speed 400m

Both are symmetric int4 in blocks of 32, head included, accuracy level 4, on the CPU; `g128` is ours
with blocks of 128 behind the head and the embedding, by GPTQ for tale-6m. Speed: one process has
all folders open in onnxruntime-genai and lets them take turns; the first round is not counted, and
a ratio is the median of the rounds' own ratios. How a process's memory lies makes up to a tenth of
its speed, so that is done in several: told is the median of their ratios, the least and the most.
prefill is a prompt's tokens by the seconds to the first token, decode is the tokens after it.
Cost: whole processes; ours is the quantization (rounding, no calibration) and the export, the
builder's does both. 400m is a Llama of that size with random weights. Quality, of tale-6m only: KL
divergence of the source's logits on TinyStories' test set, of the builder's rounding, of ours, of
GPTQ, and of AWQ with GPTQ, both calibrated on the model's own text; head and embedding are rounded
in all of them, so all but g128, which is smaller, are of one size. The result goes to
benchmarks/results.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.export.generate import RATES
from benchmarks.processes import (
    REPO,
    SHARED,
    Cost,
    package_versions,
    run,
    setting,
    wait_until_quiet,
    write_result,
)

MODELS = ("tale-6m", "400m")
PACKAGES = ("onnxruntime", "onnxruntime-genai", "torch", "transformers")
TEXT = SHARED / "text" / "tinystories" / "tinystories_test.txt"
ROUND = "scheme: W4A16, group_size: 32"
WIDE = "scheme: W4A16, group_size: 128"
# The head has the embedding's codes where both are rounded alike, as the builder shares them.
ENDS = f"  - {{method: rtn, {ROUND}, targets: [lm_head, embed_tokens]}}\n"
HEAD = f"  - {{method: rtn, {ROUND}, targets: [lm_head]}}\n"
CALIBRATION = "calibration: {sources: self, samples: 128, length: 512}\n"
# What -> (stages before that of the ends, what else the recipe has).
RECIPES = {
    "rtn": (f"  - {{method: rtn, {ROUND}}}\n", ""),
    "gptq": (f"  - {{method: gptq, {ROUND}}}\n", CALIBRATION),
    "g128": (f"  - {{method: gptq, {WIDE}}}\n", CALIBRATION),
    "g128-rtn": (f"  - {{method: rtn, {WIDE}}}\n", ""),
    "awq-gptq": (f"  - {{method: awq}}\n  - {{method: gptq, {ROUND}}}\n", CALIBRATION),
}


def source(name: str, work: Path, blocks: int | None) -> Path:
    """A checkpoint; made by a process of its own, so that this one stays small."""
    if name == "tale-6m":
        return REPO / "examples" / name
    more = [] if blocks is None else ["--blocks", str(blocks)]
    command = [sys.executable, "-m", "benchmarks.models", name, str(work / name), *more]
    subprocess.run(command, check=True, cwd=REPO)
    return work / name


def recipe(method: str, ends: str, work: Path) -> Path:
    stages, more = RECIPES[method]
    path = work / f"{method}.yaml"
    path.write_text(f"name: {method}\ndescription: int4\nstages:\n{stages}{ends}{more}")
    return path


def ours(model: Path, method: str, work: Path, quiet: float) -> tuple[Path, dict[str, Any]]:
    """Our folder, and what quantizing and exporting cost."""
    cli, quantized, out = (
        [sys.executable, "-m", "compress.cli"],
        work / f"{method}.ct",
        work / method,
    )
    ends = ENDS if model.name == "tale-6m" else HEAD
    made = recipe(method, ends, work)
    wait_until_quiet(quiet)
    rounding = run(
        [*cli, "run", str(made), "--model", str(model), "--out", str(quantized)],
        work / f"{method}.run.log",
    )
    command = [*cli, "export", str(quantized), "--to", "onnx-genai", "-o", str(out)]
    wait_until_quiet(quiet)
    export = run([*command, "--no-verify"], work / f"{method}.log")
    return out, {"quantize": cost(rounding), "export": cost(export), "bytes": size(out)}


def building(model: Path, out: Path, cache: Path) -> list[str]:
    """The builder's command line, for 4 bits on the CPU."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(model)]
    return [*command, "-o", str(out), "-p", "int4", "-e", "cpu", "-c", str(cache)]


def builders(model: Path, work: Path, quiet: float) -> tuple[Path, dict[str, Any]]:
    """The builder's folder, and what it cost."""
    out = work / "builder"
    wait_until_quiet(quiet)
    built = run(building(model, out, work / "cache"), work / "builder.log")
    return out, {"build": cost(built), "bytes": size(out)}


def cost(of: Cost) -> dict[str, float]:
    return {
        "wall_s": round(of.wall_s, 2),
        "cpu_s": round(of.cpu_s, 2),
        "peak_rss_mb": round(of.peak_rss_bytes / 1e6),
        "machine_used_by_others": round(of.others, 3),
    }


def size(folder: Path) -> int:
    """Of the graph and its weights."""
    return sum(path.stat().st_size for path in folder.glob("model.onnx*"))


def asked(module: str, *arguments: str) -> Any:
    """What a module of this folder prints, as JSON."""
    command = [sys.executable, "-m", f"benchmarks.export.{module}", *arguments]
    done = subprocess.run(command, check=True, cwd=REPO, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def taking_turns(pairs: list[str], counts: Sequence[int], processes: int) -> dict[str, Any]:
    """What generate.py prints, of several processes."""
    runs = [asked("generate", *pairs, *map(str, counts)) for _ in range(processes)]
    names = [pair.split("=", 1)[0] for pair in pairs]
    result: dict[str, Any] = {
        name: {rate: round(median(run[name][rate] for run in runs), 1) for rate in RATES}
        for name in names
    }
    result["ratios"] = {name: _spread([run["ratios"][name] for run in runs]) for name in names[:-1]}
    return result


def _spread(ratios: list[dict[str, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rate in RATES:
        of_each = [ratio[rate] for ratio in ratios]
        found[rate] = round(median(of_each), 3)
        found[f"{rate}_range"] = [min(of_each), max(of_each)]
    return found


def quality(model: Path, folders: dict[str, Path], windows: int, work: Path) -> dict[str, Any]:
    whole = work / "source"
    command = [sys.executable, "-m", "compress.cli", "export", str(model), "--to", "onnx-genai"]
    run([*command, "-o", str(whole), "--no-verify"], work / "source.log")
    pairs = [f"{name}={folder}" for name, folder in folders.items()]
    given = ["--text", str(TEXT), "--windows", str(windows)]
    return dict(asked("divergence", str(model), str(whole), *pairs, *given))


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    model, trained = source(options.model, work, options.blocks), options.model == "tale-6m"
    methods = {"ours": "rtn", "g128": "g128" if trained else "g128-rtn"}
    made = {name: ours(model, method, work, options.quiet) for name, method in methods.items()}
    made["builder"] = builders(model, work, options.quiet)
    folders = {name: folder for name, (folder, _) in made.items()}
    pairs = [f"{name}={folder}" for name, folder in folders.items()]
    counts = (options.prompt, options.tokens, options.rounds, options.threads)
    wait_until_quiet(options.quiet)
    result: dict[str, Any] = {
        "speed": taking_turns(pairs, counts, options.processes),
        "cost": {name: spent for name, (_, spent) in made.items()},
    }
    if trained:
        for method in ("gptq", "awq-gptq"):
            folders[method], _ = ours(model, method, work, options.quiet)
        result["quality"] = quality(model, folders, options.windows, work)
    theirs = size(folders["builder"])
    result["bytes_over_the_builders"] = {x: round(size(y) / theirs, 4) for x, y in folders.items()}
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="generated")
    parser.add_argument("--rounds", type=int, default=5, help="one more, not counted, comes first")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--windows", type=int, default=100, help="of 256 tokens, for the quality")
    parser.add_argument("--blocks", type=int, help="of 400m, for a quick try")
    parser.add_argument("--quiet", type=float, default=0.1, help="start when others use less")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="compress-model-", dir=options.work))
    try:
        found = measure(options, work)
    finally:
        shutil.rmtree(work)
    result = {
        **setting("benchmarks.export.genai_speed"),
        "threads": options.threads,
        "versions": package_versions(sys.executable, PACKAGES),
        "model": options.model,
        "blocks": options.blocks,
        "prompt": options.prompt,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "processes": options.processes,
        **found,
    }
    blocks = f"_{options.blocks}_blocks" if options.blocks else ""
    write_result(f"export_genai_{options.model}{blocks}", result)


if __name__ == "__main__":
    main()
