"""How a checkpoint comes about and how it is measured, each by a process of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import REPO, package_versions, run, wait_until_quiet
from benchmarks.quality.rows import CALIBRATION, LENGTH, OURS, SAMPLES, Cell, Model

# Of each tool: its environment in .venv-peers (and the variable that names another interpreter),
# its script in benchmarks/peers, the packages whose versions count.
PEERS = {
    "llm-compressor": (
        "llmcompressor",
        "llmcompressor_run.py",
        ("llmcompressor", "compressed-tensors", "transformers", "torch"),
    ),
    "bitsandbytes": (
        "bitsandbytes",
        "bitsandbytes_int8.py",
        ("bitsandbytes", "transformers", "torch"),
    ),
}
OUR_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
MEASURES = ("perplexity", "kl", "top1_agreement", "bits_per_weight")


@dataclass(frozen=True, slots=True)
class Made:
    """A finished checkpoint and what it cost."""

    out: Path
    cost: dict[str, float]


def make(cell: Cell, seed: int, work: Path, quiet: float | None = None) -> Made:
    """The checkpoint of a cell from one draw of calibration rows, in `work`.

    What an earlier call finished is taken as it is, unless `quiet` is given: then it is made anew
    as soon as others use less than that share of the machine. RuntimeError with the tool's last
    lines when it fails.
    """
    out = work / "made" / cell.model.name / slug(f"{cell.tool}-{cell.row.group}-{cell.row.name}")
    out = out / str(seed)
    log, cost = out / "log", out / "cost.json"
    if quiet is not None or not cost.is_file():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        command = our_command if cell.tool == OURS else peer_command
        line = command(cell, seed, work, out)
        if quiet is not None:
            wait_until_quiet(quiet)
        found = run(line, log, environment(cell.tool))
        copy_tokenizer(cell.model, out / "result")
        cost.write_text(json.dumps(asdict(found)))
    return Made(out / "result", json.loads(cost.read_text()))


def slug(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name)


def our_command(cell: Cell, seed: int, work: Path, out: Path) -> list[str]:
    """`compress-model run`; it reads and tokenizes the text by itself."""
    recipe: dict[str, Any] = {"name": "quality", "seed": seed, "stages": list(cell.stages)}
    if cell.row.seeds:
        sources = [{"text": str(CALIBRATION)}]
        recipe["calibration"] = {"sources": sources, "samples": SAMPLES, "length": LENGTH}
    path = out / "recipe.yaml"
    path.write_text(json.dumps(recipe, indent=1))  # JSON is YAML
    words = ["-m", "compress.cli", "run", str(path), "--model", str(cell.model.path)]
    return [sys.executable, *words, "--out", str(out / "result")]


def peer_command(cell: Cell, seed: int, work: Path, out: Path) -> list[str]:
    """The peer's script; where it looks at data it is handed the same rows, tokenized."""
    _, script, _ = PEERS[cell.tool]
    path = REPO / "benchmarks" / "peers" / script
    command = [peer_python(cell.tool), str(path), str(cell.model.path), str(out / "result")]
    assert cell.row.peer is not None
    if cell.row.peer.seeds:
        command += ["--rows", str(calibration_rows(cell.model, seed, work))]
    return [*command, *cell.flags]


def calibration_rows(model: Model, seed: int, work: Path) -> Path:
    """The rows that a run of ours with this seed calibrates on."""
    path = work / "rows" / f"{model.name}-{seed}.safetensors"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.peers.rows", str(model.path)]
        command += [str(CALIBRATION), str(path), "--samples", str(SAMPLES)]
        command += ["--length", str(LENGTH), "--seed", str(seed)]
        subprocess.run(command, check=True, cwd=REPO, capture_output=True)
    return path


def peer_python(tool: str) -> str:
    """Interpreter of a peer: $LLMCOMPRESSOR_PYTHON and so on, or the one install.sh made."""
    name = PEERS[tool][0]
    default = REPO / ".venv-peers" / name / "bin" / "python"
    python = os.environ.get(f"{name.upper()}_PYTHON", str(default))
    if not Path(python).is_file():
        raise SystemExit(f"{python} is not there; run benchmarks/peers/install.sh {name}")
    return python


def environment(tool: str) -> dict[str, str]:
    """Ours as it is; a peer must not see our packages, nor ask a hub."""
    if tool == OURS:
        return dict(os.environ)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**own, "HF_HUB_OFFLINE": "1"}


def copy_tokenizer(model: Model, folder: Path) -> None:
    """Some tools save weights only; the text is cut by the source's tokenizer in any case."""
    for name in TOKENIZER:
        if not (folder / name).is_file():
            shutil.copyfile(model.path / name, folder / name)


def measure(
    made: Sequence[Made], model: Model, flags: Sequence[str] = ()
) -> list[dict[str, float]]:
    """What benchmarks.quality.measure finds of each checkpoint against its source."""
    folder = made[0].out.parent
    found = folder / "quality.json"
    command = [sys.executable, "-m", "benchmarks.quality.measure", str(found), str(model.path)]
    run([*command, *(str(one.out) for one in made), *flags], folder / "quality.log")
    return list(json.loads(found.read_text()))


def versions(tool: str) -> dict[str, str]:
    if tool == OURS:
        return package_versions(sys.executable, OUR_PACKAGES)
    return package_versions(peer_python(tool), PEERS[tool][2])
