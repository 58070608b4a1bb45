"""A model that a program held, as a checkpoint that is there for as long as a verb reads it."""

from pathlib import Path

from compress.checkpoint import disk
from compress.errors import RequestError

SOURCE = "source"  # the folder in OUT.partial that it is saved in, for a run
# Beside the checkpoint: it was in memory. Of which weights, once it is whole.
MARK = "in-memory-model.json"
_LABEL = " (in memory)"


def is_alone(partial: Path) -> bool:
    """Whether nothing but such a model, or its folder, lies in OUT.partial: no work has begun."""
    source = partial / SOURCE
    if not source.is_dir() or [path.name for path in partial.iterdir()] != [SOURCE]:
        return False
    # A kill may come while the mark itself is written, which is before all else.
    begun = {path.name for path in source.iterdir()} <= {MARK + disk.TEMPORARY}
    return begun or (source / MARK).is_file()


def remove_source(partial: Path) -> None:
    """Remove such a model from OUT.partial, whose lock the caller has; its mark goes last, so that
    after a kill it is still known for what it is."""
    source = partial / SOURCE
    if source.is_dir():
        for path in sorted(source.iterdir(), key=lambda path: path.name == MARK):
            disk.remove_tree(path)
        disk.rmdir(source)


def told(path: Path) -> str:
    """What reports call a checkpoint: its path; the name of one whose files will be gone."""
    if (path.parent / MARK).is_file():
        return f"{path.name}{_LABEL}"
    return str(path.resolve())


def was_in_memory(name: str) -> bool:
    """Whether what reports call a checkpoint is no path, as its files are gone."""
    return name.endswith(_LABEL) and not Path(name).is_absolute()


def require_files(name: str, where: str) -> None:
    """RequestError where what reports call a checkpoint has no files. where: who needs them, "OUT
    was measured on other tokens, and its source"."""
    if was_in_memory(name):
        raise RequestError(
            f"{where} was a model in memory, {name.removesuffix(_LABEL)}, which nobody can read"
            " again; save the model in a folder and make this result of that to have it measured"
            " anew"
        )
