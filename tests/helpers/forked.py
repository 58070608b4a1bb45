"""The command line in processes that are forked from one that has imported what a run needs.

Starting Python with torch and transformers takes 4 to 5 s of processor time, such a fork 0.1 s.
"""

import multiprocessing
import sys
from multiprocessing.context import ForkServerProcess

from compress.cli.main import main

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["compress.cli.commands.run", "compress.runs.run", "transformers.models.llama.modeling_llama"]
)


def start(words: list[str]) -> ForkServerProcess:
    """`compress-model WORDS`, begun; its exit code is the command's, -9 where it was killed."""
    process = _CONTEXT.Process(target=_obey, args=(words,))
    process.start()
    return process


def _obey(words: list[str]) -> None:
    sys.exit(main(words))
