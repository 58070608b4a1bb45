"""The output folder: built beside its final place, published by one rename.

The states a kill can leave, for an output folder OUT (each is one rename away from the next):

    OUT.partial     work goes on here; `--resume` continues it
    OUT.publishing  the result is complete; the run's own working files may still be in it
    OUT             finished
    OUT.replaced    what OUT was before --overwrite, on its way out

`publish` may be called again in each of them and ends in the same state. So OUT is at any moment
absent, the old folder, or the whole new one.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compress.checkpoint import disk
from compress.checkpoint.in_memory import SOURCE, is_alone, remove_source
from compress.checkpoint.output.lock import locked, require_idle
from compress.checkpoint.output.results import contents, foreign, is_result, remove_result
from compress.checkpoint.regular import usable
from compress.errors import OutputError

_LONGEST = "publishing"  # of the words behind OUT's name while a run goes on


@dataclass(frozen=True, slots=True)
class Output:
    """Where a run writes. All paths are absolute and on one filesystem.

    state: "fresh" (partial does not exist, is empty, or holds nothing but the model that the run
    is of), "resume" (partial is there to go on with) or "publish" (all work is done, only `publish`
    was interrupted: call it again). of_source: the run is of the model that was saved in partial.
    """

    out: Path
    partial: Path
    overwrite: bool
    state: Literal["fresh", "resume", "publish"]
    of_source: bool = False

    @property
    def publishing(self) -> Path:
        return _beside(self.out, "publishing")

    @property
    def replaced(self) -> Path:
        return _beside(self.out, "replaced")

    @property
    def source(self) -> Path:
        """Where a model that was in memory is saved for the run."""
        return self.partial / SOURCE

    @property
    def is_unmade(self) -> bool:
        """Whether what will lie in partial is this run's alone."""
        return not self.partial.exists() or (self.state == "fresh" and is_alone(self.partial))

    @property
    def complete(self) -> Path:
        """The folder of a result that only waits for its publication (state "publish")."""
        return self.publishing if self.publishing.is_dir() else self.out


def prepare_output(
    out: str | Path,
    *,
    source: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    resumable: bool = True,
) -> Output:
    """Check that a run may write to `out`; changes nothing.

    source: folder of the model that is read, which the output must not touch. overwrite: replace
    what is in `out`, if it is a result of an earlier run. resumable: the command can go on with
    what is left from an earlier one. Raises OutputError that says what is in the way and what to
    do; where a process works there, that it does, whatever lies there.
    """
    said = usable(out, "out", OutputError)
    out = said.resolve()
    _require_place(out, f"{said} leads to {out}, which" if said.is_symlink() else str(out))
    usable(_beside(out, _LONGEST), "out", OutputError)
    if source is not None:
        _require_apart(out, source.resolve())
    require_idle(*_in_order(out))
    partial = _beside(out, "partial")
    of_source = source is not None and source.resolve().is_relative_to(partial / SOURCE)
    output = Output(out, partial, overwrite, _state(out, resume=resume), of_source)
    if resume:
        _require_resumable(output)
    else:
        _require_fresh(output, resumable)
    _require_ours(output.replaced)
    if overwrite or output.state != "publish":
        _require_replaceable(output)
    return output


def require_no_run(out: Path) -> None:
    """OutputError when a process makes the result `out`, whatever its folder is called by now."""
    require_idle(*_in_order(out.resolve()))


def create_partial(output: Output) -> None:
    """Make the folder that the run works in (state "fresh")."""
    with disk.refusing(f"make {output.partial}"):
        disk.require_handles(output.partial.parent)
        if not output.partial.is_dir():
            disk.mkdir(output.partial)
        disk.fsync_path(output.partial.parent)


def publish(output: Output, working: Iterable[str] = ()) -> None:
    """Turn OUT.partial into OUT; after a kill, call it again with the same arguments.

    working: names inside the folder (files or folders) that are the run's own and must go.
    """
    with disk.refusing(f"publish {output.out}"):
        if output.partial.is_dir() and not output.publishing.exists():
            _sync_tree(output.partial)
            disk.rename(output.partial, output.publishing)
            disk.fsync_path(output.out.parent)
        if output.publishing.is_dir():
            _remove_working(output.publishing, working)
            _move_aside(output)
            disk.rename(output.publishing, output.out)
            disk.fsync_path(output.out.parent)
        if output.replaced.is_dir():
            _require_ours(output.replaced)
            remove_result(output.replaced)


def write_atomic(path: Path, data: bytes, remedy: str = disk.RESUME) -> None:
    """Replace a file so that a reader (or a crash) sees the old bytes or the new, never a mix.

    remedy: for errors of the disk that have none of their own.
    """
    temporary = path.with_name(path.name + disk.TEMPORARY)
    with disk.refusing(f"write {path}", remedy):
        try:
            _write_new(temporary, data)
            disk.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                disk.unlink(temporary)
            raise
        disk.fsync_path(path.parent)


def _write_new(path: Path, data: bytes) -> None:
    fd = disk.open_write(path)
    try:
        disk.truncate(fd, len(data))
        disk.write_all(fd, memoryview(data), 0)
        disk.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(path: Path) -> int:
    """Bytes an ordinary user may still write to the disk of an existing folder."""
    with disk.refusing(f"look at the disk of {path}"):
        found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


@contextmanager
def claimed(output: Output) -> Iterator[None]:
    """Hold the folder that a run works in, or only publishes; made where it is not there. What is
    left there of a model that was in memory goes, unless the run is of that.

    OutputError when another process has it, and when one came since `prepare_output` looked.
    """
    made = output.state == "fresh" and not output.partial.exists()
    if output.state == "fresh":
        create_partial(output)
    with locked(output.complete if output.state == "publish" else output.partial):
        try:
            _require_as_found(output)
        except OutputError:
            if made:
                with suppress(OSError):
                    disk.rmdir(output.partial)
            raise
        if output.state == "fresh" and not output.of_source:
            with disk.refusing(f"clear {output.partial}"):
                remove_source(output.partial)
        yield


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(f"{out.name}.{suffix}")


def _in_order(out: Path) -> tuple[Path, ...]:
    """The names that the folder of a run takes, one after the other."""
    return _beside(out, "partial"), _beside(out, "publishing"), out


def _require_as_found(output: Output) -> None:
    """OutputError when another process changed what a run found when it looked."""
    if _state(output.out, resume=output.state == "resume") != output.state:
        raise OutputError(
            f"another process came to {output.out} and ended since this one began; run this again"
        )
    if output.state != "publish":
        _require_replaceable(output)


def _state(out: Path, *, resume: bool) -> Literal["fresh", "resume", "publish"]:
    """resume: what was saved of a model in memory is something to go on with."""
    partial = _beside(out, "partial")
    if _beside(out, "publishing").exists():
        return "publish"
    if _holds_something(partial) and (resume or not is_alone(partial)):
        return "resume"
    return "publish" if _beside(out, "replaced").exists() else "fresh"


def _require_place(out: Path, name: str) -> None:
    parent = out.parent
    if out == parent or out.is_mount():
        raise OutputError(f"{name} is a mount point; choose a folder inside it")
    if out.exists() and not out.is_dir():
        raise OutputError(f"{name} is a file; choose a folder")
    if not parent.is_dir():
        raise OutputError(f"{parent} does not exist; make it first, or choose another folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{parent} cannot be written to; choose another folder")


def _require_apart(out: Path, source: Path) -> None:
    if out == source:
        raise OutputError(f"{out} is the model itself; choose another folder for the output")
    if out.is_relative_to(source):
        raise OutputError(f"{out} is inside the model's folder {source}; choose another folder")
    if source.is_relative_to(out):
        raise OutputError(f"{out} holds the model {source}; choose another folder for the output")


def _require_resumable(output: Output) -> None:
    if output.state != "fresh":
        return
    if _holds_something(output.out):
        raise OutputError(
            f"nothing to resume: {output.out} is there and {output.partial} is not, so the run had"
            " finished"
        )
    raise OutputError(
        f"nothing to resume: there is no {output.partial}; run without --resume to start"
    )


def _require_fresh(output: Output, resumable: bool) -> None:
    if output.state == "fresh":
        return
    if output.publishing.exists():
        finish = "add --resume to do that" if resumable else f"rename it to {output.out}"
        raise OutputError(
            f"{output.publishing} holds the whole result of a run that was stopped before it became"
            f" {output.out}; {finish}, or remove it to start again"
        )
    if output.replaced.exists():
        finish = "add --resume, which removes it" if resumable else "remove it"
        raise OutputError(
            f"{output.replaced} is what {output.out} was before a run that was stopped at its very"
            f" end, and {output.out} is its result; {finish}"
        )
    again = ", or add --resume if this is the same run" if resumable else ""
    raise OutputError(
        f"{output.partial} is left from a run that was stopped; remove it to start again{again}"
    )


def _require_replaceable(output: Output, then: str = "") -> None:
    """OutputError when there is something in OUT that may not go. then: what to do afterwards."""
    out = output.out
    if not _holds_something(out):
        return
    if not is_result(out):
        raise OutputError(
            f"{out} is not empty and no result of an earlier run (it holds {contents(out)}), and"
            f" only that is ever replaced; choose another folder or empty it{then}"
        )
    if not output.overwrite:
        raise OutputError(f"{out} is not empty; choose another folder or add --overwrite{then}")


def _require_ours(replaced: Path) -> None:
    """OutputError when OUT.replaced, which goes at the end, holds what no result does."""
    if _holds_something(replaced) and foreign(replaced):
        raise OutputError(
            f"{replaced} holds {contents(replaced)}, which no result has, and a run removes that"
            " folder; move it away"
        )


def _holds_something(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _sync_tree(folder: Path) -> None:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            _sync_tree(entry)
        elif entry.is_file():
            disk.fsync_path(entry)
    disk.fsync_path(folder)


def _remove_working(folder: Path, working: Iterable[str]) -> None:
    leftovers = sorted(folder.rglob("*" + disk.TEMPORARY))
    for path in [*(folder / name for name in working), *leftovers]:
        if path.exists() or path.is_symlink():
            disk.remove_tree(path)
    disk.fsync_path(folder)


def _move_aside(output: Output) -> None:
    if not _holds_something(output.out):
        return  # rename replaces an empty folder
    require_idle(output.out)
    _require_replaceable(output, ", then run again with --resume")
    if output.replaced.exists():
        _require_ours(output.replaced)
        remove_result(output.replaced)
    disk.rename(output.out, output.replaced)
    disk.fsync_path(output.out.parent)
