"""Units of a pass that looks at data, and the files of hidden states that it keeps."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compress.checkpoint import disk
from compress.checkpoint.output.folder import write_atomic
from compress.edits import EDITS
from compress.edits.learned import BySite
from compress.errors import OutputError
from compress.passes.journal import CALIBRATION, CHOSEN
from compress.passes.units import EMBED, HEAD, IDENTITY, OUTSIDE, block_unit
from compress.plan.passes import PassPlan
from compress.report.records.sizes import SizeCandidate
from compress.report.schema import LinearRepair

FACTS = "facts"  # key of a block's record: lines of the report about its linears
SOURCE, EDITED = "source", "edited"  # the two chains
GRADIENTS = "gradients"  # the unit that takes those of the whole model
BASIS = "basis"  # the unit that finds what stays of the residual stream


WORKING = "working"  # the folder in OUT.partial of such files


def states_path(folder: Path, chain: str, turn: int) -> Path:
    """Of the states of a chain; the two turns are used one after the other."""
    return folder / f"states.{chain}.{turn}"


def make_working(partial: Path) -> Path:
    """The folder of files that a pass keeps for the time being, in OUT.partial."""
    folder = partial / WORKING
    if not folder.is_dir():
        with disk.refusing(f"make {folder}"):
            disk.mkdir(folder)
            disk.fsync_path(partial)
    return folder


def learned_units(planned: PassPlan) -> list[str]:
    """All units of the pass in order."""
    blocks = [block_unit(block.index) for block in planned.result.spec.blocks]
    before = [CALIBRATION, *([GRADIENTS] if by_gradients(planned) else []), IDENTITY]
    if planned.narrows:
        return [*before, BASIS, OUTSIDE, EMBED, *blocks, HEAD]
    return [*before, OUTSIDE, EMBED, *blocks]


def by_gradients(planned: PassPlan) -> bool:
    """Whether the pass looks at the gradients of the whole model."""
    stage = planned.stage
    work = None if stage is None else EDITS[stage.method].work
    return stage is not None and isinstance(work, BySite) and work.by_gradients(stage.config)


def keep(path: Path, held: bytes) -> str:
    """Write a file that a killed run finds again; what `read_kept` knows it by."""
    write_atomic(path, held)
    return hashlib.sha256(held).hexdigest()


def read_kept(path: Path, sha256: str) -> bytes:
    """What is left of it. OutputError when the file is gone or is not what was recorded."""
    remedy = f"remove {path.parent.parent} and start again"
    try:
        held = path.read_bytes()
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror or error}; {remedy}") from error
    if hashlib.sha256(held).hexdigest() != sha256:
        raise OutputError(f"{path} was changed while the run was stopped; {remedy}")
    return held


def basis_path(folder: Path, name: str) -> Path:
    """Of the basis that pass `name` found. It stays until the run ends: later passes read it."""
    return folder / f"basis.{name}.safetensors"


def repairs_of(units: Mapping[str, Any]) -> tuple[LinearRepair, ...]:
    """Lines of the report from what such a pass has recorded."""
    listed = (data[FACTS] for data in units.values() if FACTS in data)
    return tuple(LinearRepair(**fact) for facts in listed for fact in facts)


def candidates_of(units: Mapping[str, Any]) -> tuple[SizeCandidate, ...]:
    """Lines of the report from what a search of sizes has recorded."""
    return tuple(SizeCandidate(**x) for x in units.get(CHOSEN, {}).get("candidates", ()))


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove files of a pass that is done, as far as they are there."""
    for name in names:
        if (folder / name).exists():
            disk.unlink(folder / name)


def remove_states(folder: Path) -> None:
    """Remove the hidden states of a pass that is done."""
    paths = [states_path(folder, x, turn) for x in (SOURCE, EDITED) for turn in (0, 1)]
    remove_files(folder, [path.name for path in paths])
