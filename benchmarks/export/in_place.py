"""What a graph that points to the checkpoint's weights costs, beside one with weights of its own.

    python -m benchmarks.export.in_place [--work /tmp] [--rounds 9] [--model s8-mha]

Random weights in bf16 (cast when the graph is opened) and the same in fp32 (taken as they are) are
made here, exported both ways in fp32 without a proof, and removed. Seconds are the process's own
processor time, which others on the machine change little. Export: of the whole process, with its
peak memory. Opening: a process of its own each time, the two graphs by turns, one thread, the first
round not counted; medians of the seconds until ONNX Runtime has the session, of those of a step of
one token, and of the process's peak memory before, when the session is there, and behind all steps.
Pages of mapped weights that were read count there.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.processes import (
    REPO,
    package_versions,
    run,
    setting,
    write_result,
)

CLI = (sys.executable, "-m", "compress.cli")
WAYS = ("copied", "in_place")
WIDEN = """\
import json, shutil, sys
from pathlib import Path
from safetensors.torch import load_file, save_file
source, target = map(Path, sys.argv[1:])
shutil.copytree(source, target)
for path in target.glob("*.safetensors"):
    save_file({name: x.float() for name, x in load_file(path).items()}, path)
config = json.loads((target / "config.json").read_text())
(target / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
"""


def sources(model: str, work: Path) -> dict[str, Path]:
    """Checkpoints by the dtype of their numbers, made by processes of their own."""
    narrow, wide = work / "bf16", work / "fp32"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.models", model, str(narrow)], check=True, cwd=REPO
    )
    subprocess.run([sys.executable, "-c", WIDEN, str(narrow), str(wide)], check=True)
    return {"bf16": narrow, "fp32": wide}


def export(source: Path, way: str, work: Path) -> tuple[Path, dict[str, Any]]:
    """The folder that has the graph, and what the export cost."""
    out = work / f"{source.name}-out"
    where = ["--in-place"] if way == "in_place" else ["-o", str(out)]
    log = work / f"{source.name}.{way}.log"
    cost = run([*CLI, "export", str(source), "--to", "onnx", *where, "--no-verify"], log)
    folder = source if way == "in_place" else out
    written = sum(path.stat().st_size for path in folder.glob("model.onnx*"))
    return folder, {
        "bytes_written": written,
        "cpu_s": round(cost.cpu_s, 2),
        "peak_rss_mb": round(cost.peak_rss_bytes / 1e6),
    }


def opened(folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.export.opening", str(folder / "model.onnx")]
    done = subprocess.run(command, check=True, cwd=REPO, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def by_turns(folders: dict[str, Path], rounds: int) -> dict[str, dict[str, float]]:
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in folders}
    for number in range(rounds + 1):
        # The first goes last in half of the rounds.
        for way in list(folders)[:: 1 if number % 2 else -1]:
            found = opened(folders[way])
            if number:
                runs[way].append(found)
    return {
        way: {key: round(statistics.median(x[key] for x in found), 4) for key in found[0]}
        for way, found in runs.items()
    }


def compared(source: Path, work: Path, rounds: int) -> dict[str, Any]:
    made = {way: export(source, way, work) for way in WAYS}
    opening = by_turns({way: folder for way, (folder, _) in made.items()}, rounds)
    return {way: {"export": cost, "opening": opening[way]} for way, (_, cost) in made.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=9, help="one more, not counted, comes first")
    parser.add_argument("--model", default="s8-mha", help="a shape of benchmarks.models")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="compress-model-", dir=options.work))
    try:
        models = sources(options.model, work)
        found = {name: compared(path, work, options.rounds) for name, path in models.items()}
        size = {name: size_of(path) for name, path in models.items()}
    finally:
        shutil.rmtree(work)
    result = {
        **setting("benchmarks.export.in_place"),
        "versions": package_versions(sys.executable, ("onnxruntime", "onnx", "onnx-ir", "torch")),
        "model": options.model,
        "rounds": options.rounds,
        "weights_bytes": size,
        **found,
    }
    write_result("export_in_place", result)


def size_of(source: Path) -> int:
    return sum(path.stat().st_size for path in source.glob("*.safetensors"))


if __name__ == "__main__":
    main()
