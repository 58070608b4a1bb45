"""What is run side by side with llm-compressor, and how either tool is started."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import REPO, SHARED, Cost, run

PACKAGES = ("llmcompressor", "compressed-tensors", "transformers", "torch")
RECIPE = """\
name: side-by-side
seed: {seed}
stages:
  - method: gptq
    scheme: W4A16
    group_size: {group}
calibration:
  sources: [{{text: {text}}}]
  samples: {samples}
  length: {length}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: 4-bit symmetric GPTQ in groups of `group`, lm_head kept, bf16.

    model: a shape of benchmarks.models, or a folder in ../shared/models.
    bars: least factors in CPU seconds by which we are to be ahead ("run", "solves").
    """

    name: str
    model: str
    samples: int
    length: int
    group: int
    bars: dict[str, float]


CASES = (
    Case("s8-mha-g128", "s8-mha", 64, 512, 128, {"run": 2.0, "solves": 8.0}),
    Case("tale-6m-g64", "tale-6m", 128, 256, 64, {"run": 2.5}),
    Case("tale-6m-g128", "tale-6m", 128, 256, 128, {"run": 2.5}),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """A case made ready in a work folder: what both tools read."""

    case: Case
    work: Path
    model: Path
    rows: Path
    recipe: Path
    rows_sha256: str


@dataclass(frozen=True, slots=True)
class Done:
    """One finished run. solve, method: calls and seconds ("wall_s", "cpu_s") inside them."""

    out: Path
    cost: Cost
    solve: dict[str, float]
    method: dict[str, float]


def text() -> Path:
    return SHARED / "text" / "tinystories" / "tinystories_train.txt"


def prepare(case: Case, work: Path, seed: int = 0) -> Inputs:
    """Make model, rows and recipe, each by a process of its own."""
    work.mkdir(parents=True, exist_ok=True)
    model = SHARED / "models" / case.model
    if not model.is_dir():
        model = work / case.model
        if not (model / "tokenizer_config.json").is_file():
            subprocess.run(
                [sys.executable, "-m", "benchmarks.models", case.model, str(model)],
                check=True,
                cwd=REPO,
            )
    rows, recipe = work / f"{case.name}-{seed}.safetensors", work / f"{case.name}-{seed}.yaml"
    settings = {"samples": case.samples, "length": case.length, "seed": seed}
    recipe.write_text(RECIPE.format(text=text(), group=case.group, **settings))
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    made = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.rows", str(model), str(text()), str(rows), *flags],
        check=True,
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    return Inputs(case, work, model, rows, recipe, made.stdout.split()[-1])


def run_ours(inputs: Inputs) -> Done:
    """`compress-model run` on the text; it tokenizes by itself."""
    out, clock = inputs.work / "ours", inputs.work / "ours-clock.json"
    command = [sys.executable, "-m", "benchmarks.peers.ours_gptq", str(clock), "run"]
    command += [str(inputs.recipe), "--model", str(inputs.model), "--out", str(out)]
    cost = run([*command, "--dtype", "bf16", "--overwrite"], inputs.work / "ours.log")
    report = json.loads((out / "report" / "report.json").read_text())
    if report["calibration"]["sha256"] != inputs.rows_sha256:
        raise RuntimeError("our run calibrated on other rows than the peer's")
    return Done(out, cost, **json.loads(clock.read_text()))


def run_peer(inputs: Inputs, batch_size: int = 1) -> Done:
    """llm-compressor on the same rows, tokenized beforehand. 1 is its default batch size."""
    out, clock = inputs.work / "peer", inputs.work / "peer-clock.json"
    script = Path(__file__).with_name("llmcompressor_gptq.py")
    command = [peer_python(), str(script), str(inputs.model), str(inputs.rows), str(out)]
    command += [str(clock), "--group-size", str(inputs.case.group)]
    command += ["--batch-size", str(batch_size)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    cost = run(command, inputs.work / "peer.log", {**environment, "HF_HUB_OFFLINE": "1"})
    return Done(out, cost, **json.loads(clock.read_text()))


def peer_python() -> str:
    """Interpreter that has llm-compressor: $LLMCOMPRESSOR_PYTHON, or the one install.sh made."""
    default = REPO / ".venv-peers" / "llmcompressor" / "bin" / "python"
    python = os.environ.get("LLMCOMPRESSOR_PYTHON", str(default))
    if not Path(python).is_file():
        raise SystemExit(f"{python} is not there; run benchmarks/peers/install.sh llmcompressor")
    return python


def describe(case: Case) -> dict[str, Any]:
    """The case for a result file."""
    return {
        "model": case.model,
        "scheme": f"W4A16 symmetric, groups of {case.group}, lm_head kept, bf16",
        "calibration": f"{case.samples} rows of {case.length} tokens of {text().name},"
        " the same ids for both",
    }
