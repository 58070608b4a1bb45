"""The command line in processes that are forked from one that has imported what a run needs.

Starting Python with torch and transformers takes 4 to 5 s of processor time, such a fork 0.1 s.
"""

import multiprocessing
import os
import signal
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from compress.cli.main import entry, main

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["compress.cli.commands.run", "compress.runs.run", "transformers.models.llama.modeling_llama"]
)


def start(words: list[str]) -> ForkServerProcess:
    """`compress-model WORDS`, begun; its exit code is the command's, -9 where it was killed."""
    process = _CONTEXT.Process(target=_obey, args=(words,))
    process.start()
    return process


def start_heard(words: list[str], said: Path) -> ForkServerProcess:
    """The same as the console script does it, with all that it prints in the file `said`."""
    process = _CONTEXT.Process(target=_enter, args=(words, said))
    process.start()
    return process


def _obey(words: list[str]) -> None:
    sys.exit(main(words))


def _enter(words: list[str], said: Path) -> None:
    # A job that a shell starts in the background ignores SIGINT, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with said.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.argv = ["compress-model", *words]
    entry()
