"""An export's folder: work is done in OUT.partial, and OUT appears by one rename, or not at all.

It takes minutes, so a stopped one starts anew, where a run resumes from its journal.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from compress.checkpoint import (
    Output,
    claimed,
    disk,
    free_bytes,
    prepare_output,
    publish,
)
from compress.checkpoint.in_memory import SOURCE
from compress.errors import OutputError
from compress.report.units import two_sizes

T = TypeVar("T")


def prepare(out: str | Path, source: Path, needed: int, *, overwrite: bool) -> Output:
    """The folder, looked at and not yet made. OutputError where it is in the way of what is there,
    and unless the disk has room for `needed` bytes."""
    output = prepare_output(out, source=source, overwrite=overwrite, resumable=False)
    require_room(output.partial.parent, needed)
    return output


def require_room(folder: Path, needed: int) -> None:
    free = free_bytes(folder)
    if needed > free:
        needs, there = two_sizes(needed, free)
        raise OutputError(
            f"not enough disk space in {folder}: {needs} are needed, {there} are free; make room"
            " or choose another disk"
        )


def published(output: Output, work: Callable[[], T]) -> T:
    """What `work` returns, once its files have taken OUT's place; nothing is left of one that
    fails."""
    with disk.spare_handle(), claimed(output):
        try:
            result = work()
        except (Exception, KeyboardInterrupt):
            with suppress(OSError):
                disk.remove_tree(output.partial)
            raise
        publish(output, (SOURCE,))
    return result
