"""Whether this machine has a GPU that torch can use; if not, why, and the line that helps."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

DRIVER = Path("/dev/nvidia0")
_ASKED_SECONDS = 10.0
# Where builds of torch for one CUDA lie, and the one for processors alone.
INDEX = "https://download.pytorch.org/whl"
# CUDA versions that a driver must at least have -> the index of builds that run on it. The newest
# first; each name is one that torch's own installer page has had.
INDEXES = (((13, 0), "cu130"), ((12, 6), "cu126"))


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The torch that is installed. cuda: the CUDA (or ROCm) that it was built for, None of none."""

    version: str
    cuda: str | None

    def __str__(self) -> str:
        return f"torch {self.version}, {f'for CUDA {self.cuda}' if self.cuda else 'a CPU build'}"


def torch_build() -> TorchBuild:
    """Of the torch of this process."""
    return TorchBuild(torch.__version__, torch.version.cuda or getattr(torch.version, "hip", None))


def has_nvidia() -> bool:
    """Whether the system has an NVIDIA GPU, whatever torch makes of it."""
    return DRIVER.exists() or driver_cuda() is not None


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, as nvidia-smi says; None where it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, timeout=_ASKED_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"CUDA(?: UMD)? Version:\s*(\d+)\.(\d+)", done.stdout)
    return None if found is None else (int(found[1]), int(found[2]))


def why_no_gpu(build: TorchBuild) -> tuple[str, str | None]:
    """Why torch computes on the CPU alone, and the line that changes it where one does."""
    if not has_nvidia():
        return f"no GPU is here ({build})", None
    if build.cuda is None:
        return f"a GPU is here, but not for this torch ({build})", install_line(build)
    return (
        f"a GPU is here, but torch does not see it ({build}; the driver runs {_driver()})",
        install_line(build),
    )


def install_line(build: TorchBuild) -> str | None:
    """What installs the same torch for this machine's driver; None for a driver that is too old, or
    does not answer."""
    runs = driver_cuda()
    name = next((name for least, name in INDEXES if runs is not None and runs >= least), None)
    if name is None:
        return None
    release = build.version.partition("+")[0]
    return f"pip install --force-reinstall torch=={release} --index-url {INDEX}/{name}"


def _driver() -> str:
    runs = driver_cuda()
    return "no CUDA that it tells" if runs is None else f"CUDA up to {runs[0]}.{runs[1]}"
