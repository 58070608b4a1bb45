"""`compress-model doctor`: what this machine offers, and what is wrong with it."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, version
from pathlib import Path

import click

from compress.cli import options
from compress.cli.printing import show
from compress.errors import CompressError
from compress.machine.memory import available_bytes, limit_bytes
from compress.machine.tested import untested
from compress.report.units import size
from compress.usercache.cache import user_cache
from compress.usercache.place import SETTING, made_folder

OLDEST_PYTHON = (3, 11)
REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "xxhash")
OPTIONAL = (
    *("triton", "datasets", "accelerate", "compressed-tensors", "gguf", "onnx"),
    *("onnxruntime", "onnxruntime-gpu", "onnxruntime-genai", "openvino"),
)
HINTS = {
    "compressed-tensors": "; transformers needs it to open results: pip install compressed-tensors",
    "accelerate": "; transformers needs it to open GGUF files: pip install accelerate",
}
# Cells of the names' column, so that on a terminal of 80 values go on below values; a longer name,
# which says of several operations what a word says, has its value behind it.
WIDEST = 32
# The installed extra decides which; both write the same files and the last one installed wins.
EXCLUSIVE = ("onnxruntime", "onnxruntime-gpu")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the answer; `problem` says what is wrong and how to mend it."""

    name: str
    value: str
    problem: str | None = None


@click.command("doctor")
@options.as_json
def command(as_json: bool) -> int:
    """Check this machine and its packages; exit code 1 when something is wrong."""
    checks = list(examine())
    problems = [check for check in checks if check.problem]
    if as_json:
        options.print_json({"ok": not problems, "checks": [asdict(check) for check in checks]})
        return 1 if problems else 0
    width = max(len(x.name) for x in checks if len(x.name) <= WIDEST)
    for check in checks:
        show(f"{check.name:{width}}  {check.value}")
    click.echo()
    for check in problems:
        show(f"problem: {check.name}: {check.problem}")
    click.echo(f"{len(problems)} found" if problems else "no problem found")
    return 1 if problems else 0


def examine() -> Iterator[Check]:
    """All checks; none of them raises."""
    yield _python()
    for name in REQUIRED:
        missing = None if _version(name) else f"not installed; run `pip install {name}`"
        yield Check(name, _release(name) or "absent", missing)
    for name in OPTIONAL:
        yield Check(name, _release(name) or f"not installed{HINTS.get(name, '')}")
    yield from _torch()
    yield _memory()
    yield _disk()
    yield _cache()
    yield from _kernels()
    yield onnxruntimes()
    yield hub_kernels()


def onnxruntimes() -> Check:
    """onnxruntime and onnxruntime-gpu overwrite each other's files."""
    found = [name for name in EXCLUSIVE if _version(name)]
    if len(found) < 2:
        return Check("ONNX Runtime", found[0] if found else "not installed")
    return Check(
        "ONNX Runtime",
        " and ".join(found),
        "both are installed and overwrite each other; run `pip uninstall onnxruntime"
        " onnxruntime-gpu`, then install one extra, [onnx] or [onnx-gpu]",
    )


def hub_kernels() -> Check:
    """transformers imports a top-level package `kernels`; it must be Hugging Face's or none."""
    name = "Hugging Face kernels"
    # Looked for afresh: what this process may have imported under the name is not the question.
    spec = PathFinder.find_spec("kernels")
    # A folder without __init__.py is no package to transformers: a real one anywhere wins over it.
    if spec is None or spec.origin is None:
        missing = _version("kernels") is not None
        broken = "installed, but its files are gone; reinstall `kernels`" if missing else None
        return Check(name, _version("kernels") or "not installed", broken)
    owners = set(packages_distributions().get("kernels", []))
    if owners == {"kernels"} and _belongs(spec.origin):
        return Check(name, _version("kernels") or "")
    others = ", ".join(sorted(owners - {"kernels"})) or "no installed package"
    return Check(
        name,
        spec.origin,
        f"`import kernels` finds {spec.origin} (of {others}), not Hugging Face's package, and"
        " transformers will break; rename or uninstall it",
    )


def _belongs(origin: str) -> bool:
    """Whether a module's file lies where the `kernels` distribution was installed."""
    root = Path(str(distribution("kernels").locate_file("kernels"))).resolve()
    return Path(origin).resolve().is_relative_to(root)


def _python() -> Check:
    old = sys.version_info[:2] < OLDEST_PYTHON
    wanted = ".".join(map(str, OLDEST_PYTHON))
    return Check(
        "Python",
        platform.python_version(),
        f"older than {wanted}; install a newer one" if old else None,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(package: str) -> str | None:
    """The version, and that nobody has tested it with us where that is so."""
    found = _version(package)
    tested = None if found is None else untested(package, found)
    return found if tested is None else f"{found}, not tested with compress-model ({tested} is)"


def _torch() -> Iterator[Check]:
    """What torch sees; a torch that cannot be imported is a problem, not a traceback."""
    try:
        import torch
    except Exception as error:  # a broken build raises OSError, RuntimeError, ImportError ...
        if _version("torch"):
            yield Check("torch import", "fails", f"{error}; reinstall torch".replace("\n", " "))
        return
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("processor", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}")
    yield Check("threads", f"{torch.get_num_threads()} used by torch, {usable} cores")
    if not torch.cuda.is_available():
        yield _no_gpu()
        return
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        yield Check(f"GPU {i}", f"{properties.name}, {size(properties.total_memory)}")
    yield _chosen()


def _no_gpu() -> Check:
    """No GPU, or one that the torch that is installed cannot use: a problem, with what mends it."""
    from compress.machine.gpu import has_nvidia, torch_build, why_no_gpu

    why, line = why_no_gpu(torch_build())
    if not has_nvidia():
        return Check("GPU", why)
    return Check("GPU", why, f"run `{line}`" if line else "a newer driver is needed, or one at all")


def _chosen() -> Check:
    """What `--device auto` takes here, by its check against the CPU."""
    from compress.machine.device import settle

    found = settle("auto")
    problem = f"{found.why}; the driver, torch and triton may not fit each other"
    return Check("device auto", str(found.line), problem if found.passed_over else None)


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, available = limit_bytes(), available_bytes()
    whole = size(total)
    if limit is not None and limit < total:
        whole = f"{size(limit)} (limit of the container)"
    return Check("memory", whole if available is None else f"{whole}, {size(available)} available")


def _disk() -> Check:
    return Check("disk", f"{size(shutil.disk_usage('.').free)} free here")


def _cache() -> Check:
    """Where texts and evaluations are kept, what they take and may take."""
    name, folder = "cache", made_folder()
    try:
        found = user_cache()
    except CompressError as error:
        return Check(name, str(folder), str(error))
    if found is None:
        return Check(name, f"off, as {SETTING} says")
    count, taken = found.usage()
    entries = f"{count} {'entry' if count == 1 else 'entries'}"
    return Check(name, f"{folder}, {entries}, {size(taken)} of at most {size(found.most)}")


def _kernels() -> Iterator[Check]:
    """Which kernels run here; the plain torch ones are right but slower."""
    try:
        from compress_kernels import paths, status
    except Exception as error:  # whatever: doctor has to say it, not to fall over it
        yield Check("kernels", "fail", f"{error}; reinstall compress-model".replace("\n", " "))
        return
    for key, value in status().items():
        yield Check(f"kernels {key}", value)
    for key, value in paths().items():
        yield Check(key if key == "instruction set" else f"op {key}", value)
