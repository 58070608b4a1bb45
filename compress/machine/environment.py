"""The machine and the software a run depends on, for the report and for resuming."""

import os
import platform
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from compress.errors import OutputError
from compress.report.schema import Machine
from compress.version import VERSION
from compress_kernels import status

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "triton")


@cache
def versions(more: tuple[str, ...] = ()) -> dict[str, str]:
    """Versions of what can change a result, ours first; absent packages are left out. more: names
    of packages to look for besides."""
    found = {"compress-model": VERSION, "python": platform.python_version()}
    for package in (*PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine(device: str) -> Machine:
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return Machine(
        cpu=cpu_name(),
        threads=torch.get_num_threads(),
        memory=memory_bytes(),
        isa=torch.backends.cpu.get_cpu_capability(),
        gpu=gpu,
        kernels=status(),
    )


def slow_kernels(device: str) -> tuple[str, ...]:
    """A warning for each kind of kernel that a run on `device` has to do without."""
    return tuple(
        f"kernels, {name}: {kind}; the numbers are right, the run took longer than it need"
        for name, kind in status().items()
        if "slower" in kind and not (name == "gpu" and device == "cpu")
    )


def fingerprint(device: str, dtype: torch.dtype) -> dict[str, str]:
    """What of the environment must be equal for a resumed run to give the same bytes."""
    here = machine(device)
    return {
        "environment.compress-model": VERSION,
        "environment.torch": torch.__version__,
        "environment.transformers": versions().get("transformers", "absent"),
        "environment.threads": str(here.threads),
        "environment.isa": here.isa,
        "environment.device": here.gpu or device,
        "environment.dtype": str(dtype).removeprefix("torch."),
        **{f"environment.kernels.{name}": kind for name, kind in here.kernels.items()},
    }


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Physical memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_rss_bytes() -> int:
    """Highest resident memory of this process so far (VmHWM)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def peak_gpu_bytes(device: str) -> int | None:
    """Highest GPU memory torch held, None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else None


def check_device(device: str) -> None:
    """OutputError unless torch can compute there."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise OutputError(f"device is {device!r}; it is 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device != "cpu" and not torch.cuda.is_available():
        raise OutputError(f"device is {device!r} but torch sees no CUDA device; use --device cpu")
    if int(device.partition(":")[2] or 0) >= max(1, torch.cuda.device_count()):
        raise OutputError(f"device is {device!r} but there are {torch.cuda.device_count()} devices")


def compute_dtype(stored: str, device: str, asked: str | None) -> torch.dtype:
    """Arithmetic of calibrated passes; OutputError for an unknown name.

    bf16 where the checkpoint is bf16 and the machine multiplies it natively (on an AVX512-BF16 CPU
    5 to 8 times as fast as fp32); fp32 otherwise, because fp16 activations can overflow.
    """
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if asked is not None and asked not in names:
        raise OutputError(f"dtype is {asked!r}; it is one of {', '.join(names)}")
    if asked is not None:
        return names[asked]
    native = device.startswith("cuda") or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if stored == "BF16" and native else torch.float32
