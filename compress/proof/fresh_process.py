"""Asks a fresh process: a Python of its own, which has neither our modules nor our settings."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from compress.errors import CheckpointError, OutputError
from compress.proof.question import Answer

PATIENCE = 300  # seconds for a start on a busy machine: on a quiet one it takes 6
SLOWEST = 10_000_000  # bytes of weights a second, read and computed
_OFFLINE: Mapping[str, str] = MappingProxyType(
    {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": "",
    }
)


class Killed(Exception):
    """The process was ended as by a system without memory."""


def ask(question: Path, nbytes: int) -> Answer:
    """The answer to the question in a file. nbytes: of the weights, for the time limit.

    Raises Killed; CheckpointError where the process ends without an answer; OutputError where it
    takes too long.
    """
    limit = PATIENCE + nbytes / SLOWEST
    # -P: the current folder, which may be the model's, is no place for modules.
    command = [sys.executable, "-P", "-m", "compress.proof.stock", str(question)]
    kept_open, held = os.pipe()  # the child ends when the other end is gone, whatever ends us
    try:
        done = subprocess.run(
            command,
            stdin=kept_open,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            env=_environment(),
            cwd=question.parent,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OutputError(
            f"transformers did not open the model within {limit:.0f} s; go on with --resume when"
            " the machine has less to do"
        ) from error
    except OSError as error:
        raise OutputError(f"no process can be started to open the model: {error}") from error
    finally:
        os.close(kept_open)
        os.close(held)
    return _answer(done)


def _answer(done: "subprocess.CompletedProcess[str]") -> Answer:
    if done.returncode == -signal.SIGKILL:
        raise Killed("was killed, as by a system without memory")
    try:
        return Answer.from_json(done.stdout.rstrip().rpartition("\n")[2])
    except ValueError as error:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:400]
        raise CheckpointError(
            f"the process that opened the model in plain transformers ended with {done.returncode}"
            f" and without an answer: {said}"
        ) from error


def _environment() -> dict[str, str]:
    """Ours, offline, with the folder in which this package lies."""
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return {**os.environ, **_OFFLINE, "PYTHONPATH": path}
