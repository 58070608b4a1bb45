"""Where and how a result of the engine's benchmarks was made."""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import processes


def setting(module: str) -> dict[str, Any]:
    """`module` is the benchmark that was run; load_average is that of the minute before."""
    return {
        **processes.setting(module),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
        "load_average": float(Path("/proc/loadavg").read_text().split()[0]),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
