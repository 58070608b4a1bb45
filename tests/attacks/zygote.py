"""A process that has imported everything once and forks for every case.

Starting Python with torch and transformers takes 2 to 4 s of processor time, a fork of one that
has them 0.05 s. `python -m attacks.zygote [heavy]` reads a job (`Case.job`) a line and writes what
came of it. Each fork takes on the case's folder, environment, streams, rights and limits, and is
then the console script.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import resource
import select
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NoReturn

from attacks import rights

PACKAGES = ("compress", "compress_calibration", "compress_exporters", "compress_kernels")
# What commands import beside our own packages, with what they find lazily.
OTHERS = (
    *("torch", "transformers", "tokenizers", "safetensors.torch", "jinja2", "yaml", "numpy"),
    *("onnx", "onnx_ir", "onnxruntime", "gguf", "pyarrow", "datasets", "tempfile", "uuid"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
    *("transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral"),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.generation"),
    *("transformers.tokenization_utils_tokenizers", "transformers.masking_utils"),
)
LIGHT = (
    "compress.cli.main",
    "compress.cli.process",
    "compress.cli.commands.recipes",
    "compress.cli.commands.run",
)
PROCESSOR_SECONDS = 20  # of one case
MEMORY = 4 << 30  # that one case may take beside what the zygote has
_POLL = 0.25
_HIGH = 900  # a file descriptor that a limit of few does not reach


def main() -> None:
    for name in LIGHT:
        importlib.import_module(name)
    if "heavy" in sys.argv[1:]:
        preload()
    assert threading.active_count() == 1, "a fork has only the thread that forked"
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(attempt(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # nothing to tidy, and libraries complain when they are


def preload() -> None:
    """Import all of ours, and what it imports late; run nothing."""
    for name in (*PACKAGES, *OTHERS):
        try:
            module = importlib.import_module(name)
        except ImportError:  # an optional package; the command says that it is missing
            continue
        if name in PACKAGES:
            for found in pkgutil.walk_packages(module.__path__, f"{name}."):
                if not found.name.endswith(("__main__", ".lm_eval", ".triton")):
                    _quietly(found.name)
    sys.modules["compress_kernels"].status()  # loads the compiled ones


def _quietly(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError:
        return


def attempt(job: dict[str, Any]) -> dict[str, Any]:
    """Fork, wait, and say how it ended."""
    pipes = {name: os.pipe() for name in ("stdout", "stderr", "strays")}
    child = os.fork()
    if child == 0:
        _become(job, {name: writer for name, (_, writer) in pipes.items()})
    for _, writer in pipes.values():
        os.close(writer)
    readers = {name: reader for name, (reader, _) in pipes.items()}
    hung, told = listen(child, readers, job["sleep"])
    _, status, usage = os.wait4(child, 0)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "cpu": usage.ru_utime + usage.ru_stime,
        "rss": usage.ru_maxrss * 1024,
        "hung": hung,
        "strays": sorted(set(told["strays"].splitlines())),
        "out": told["stdout"],
        "err": told["stderr"],
    }


def listen(child: int, readers: dict[str, int], sleep: float) -> tuple[bool, dict[str, str]]:
    """Until it ends: whether it had to be killed as it only slept, and what came by each pipe."""
    done = os.pidfd_open(child)
    told = {name: bytearray() for name in readers}
    used, idle, hung = -1, 0.0, False
    watched = {done: "", **{reader: name for name, reader in readers.items()}}
    while done not in (ready := select.select(list(watched), [], [], _POLL)[0]):
        for reader in ready:
            said = os.read(reader, 1 << 16)
            told[watched[reader]] += said
            if not said:
                del watched[reader]
        ticks, asleep = activity(child)
        idle = idle + _POLL if asleep and ticks == used else 0.0
        used = ticks
        if idle >= sleep and not hung:
            hung = True
            os.killpg(child, signal.SIGKILL)
    os.close(done)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what it started and left behind
    for name, reader in readers.items():
        with os.fdopen(reader, "rb") as rest:
            told[name] += rest.read()
    return hung, {name: bytes(said).decode(errors="replace") for name, said in told.items()}


def activity(child: int) -> tuple[int, bool]:
    """Clock ticks of a process and its finished children, and whether all its threads sleep."""
    try:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        states = [
            (task / "stat").read_text().rpartition(")")[2].split()[0]
            for task in Path(f"/proc/{child}/task").iterdir()
        ]
    except OSError:  # it ended meanwhile
        return -2, False
    return sum(map(int, fields[11:15])), all(state == "S" for state in states)


def _become(job: dict[str, Any], writers: dict[str, int]) -> NoReturn:
    """In the fork: be the case's process."""
    code = 97  # the harness itself failed; no command ends so
    try:
        os.setsid()
        os.dup2(writers["strays"], _HIGH)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.umask(0o022)
        os.chdir(job["folder"])
        _environment(job["environ"])
        tempfile.tempdir = None  # what TMPDIR says now
        _streams(job, writers)
        rights.take(job["user"])
        if job["fresh"]:
            _start_anew(job)
        watch(str(Path(job["folder"]).parent))
        _plant(job)
        _limit(job["limits"], inherited=memory())
        from compress.cli.main import entry

        code = 98
        sys.argv = ["compress-model", *job["argv"]]
        entry()
    finally:
        if code == 97:
            import traceback

            traceback.print_exc()
        os._exit(code)


def _environment(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _streams(job: dict[str, Any], writers: dict[str, int]) -> None:
    """Streams 0, 1, 2 and sys's objects for them, as Python makes them at its start."""
    names = ("stdin", "stdout", "stderr")
    opened = [
        writers[name] if job[name] == "file" else open_stream(job[name], reads=name == "stdin")
        for name in names
    ]
    for number, found in enumerate(opened):
        if found is None:
            os.close(number)
        else:
            os.dup2(found, number)
    os.closerange(3, _HIGH)
    for number, name in enumerate(names):
        setattr(sys, name, None if opened[number] is None else _text(number))
        setattr(sys, f"__{name}__", getattr(sys, name))


def _text(number: int) -> io.TextIOWrapper:
    mode = "r" if number == 0 else "w"
    errors = ("strict", "strict", "backslashreplace")[number]
    return open(number, mode, encoding="utf-8", errors=errors, closefd=False)


def open_stream(kind: str, reads: bool) -> int | None:
    """A file descriptor above 2; None for a closed stream."""
    if kind == "closed":
        return None
    if kind == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
        return writer
    if kind.startswith("text:"):
        reader, writer = os.pipe()
        os.write(writer, kind[5:].encode("utf-8", "surrogateescape"))
        os.close(writer)
        return reader
    if kind == "wrong":
        return os.open("/dev/null", os.O_WRONLY if reads else os.O_RDONLY)
    return os.open(f"/dev/{kind}", os.O_RDWR)


_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link")
_HARMLESS = ("/dev/", "/proc/", "/sys/")


def watch(folder: str) -> None:
    """Tell of every path outside `folder` that is opened for writing, made, moved or removed."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(path, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event in _CHANGES:
            path = args[0]
        else:
            return
        name = os.path.realpath(os.fsdecode(path))
        if not name.startswith((folder, *_HARMLESS)) and "__pycache__" not in name:
            os.write(_HIGH, name.encode("utf-8", "replace") + b"\n")

    sys.addaudithook(hook)


def _plant(job: dict[str, Any]) -> None:
    """A full disk, or a Ctrl-C; no fsync, which no case is about."""
    from compress.checkpoint import disk

    disk.fsync = lambda fd: None
    if job["full_at"] is not None:
        from helpers import faults

        # Held open: the fork ends inside it.
        faults.fault_at(job["full_at"], "enospc").__enter__()
    if job["interrupt"] is not None:
        signal.signal(signal.SIGPROF, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_PROF, job["interrupt"])
    exec(job["plant"], {})


def memory() -> int:
    """Bytes of addresses that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit(limits: dict[str, int], inherited: int) -> None:
    own = {"AS": MEMORY, "CPU": PROCESSOR_SECONDS, "CORE": 0, **limits}
    own["AS"] += inherited
    for name, soft in own.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (soft if hard < 0 else min(soft, hard), hard))


def _start_anew(job: dict[str, Any]) -> NoReturn:
    """The console script in a process that has imported nothing."""
    if job["path"] is not None:
        os.environ["PYTHONPATH"] = job["path"]
    _limit(job["limits"], inherited=0)
    start = "import sys; from compress.cli.main import entry; entry()"
    words = [sys.executable, "-c", start, *(os.fsencode(word) for word in job["argv"])]
    os.execv(sys.executable, words)


if __name__ == "__main__":
    main()
