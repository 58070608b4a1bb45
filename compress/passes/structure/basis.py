"""The file of a basis: what a pass found to narrow the residual stream by.

It stays until the run ends, and the journal has its hash: what is left of a killed run goes on with
the same basis, and a pass behind brings the source's states into it.
"""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from compress.checkpoint.output.folder import write_atomic
from compress.edits.repair.rotation import Basis
from compress.errors import OutputError
from compress.passes.context import PassContext, record_unit
from compress.passes.journal import Journal
from compress.passes.structure.files import BASIS, basis_path
from compress.passes.structure.tokens import ReadsModel
from compress.plan.passes import PassPlan


def keep_basis(work: PassContext, planned: PassPlan, folder: Path, basis: Basis) -> None:
    """Write the basis of a pass, and record it."""
    scale = {} if basis.scale is None else {"scale": basis.scale}
    tensors = {"directions": basis.directions, **scale}
    held = save({name: value.cpu().contiguous() for name, value in tensors.items()})
    if work.ranks.rank == 0:
        write_atomic(basis_path(folder, planned.name), held)
    facts = {"sha256": hashlib.sha256(held).hexdigest(), "share": basis.share}
    record_unit(work, BASIS, facts)


def basis_before(work: ReadsModel, planned: PassPlan, folder: Path) -> Tensor | None:
    """What brings the source's stream into that of the model which a pass reads: fp32
    [source's hidden, hidden]; None where no pass before it narrowed the stream."""
    found: Tensor | None = None
    for name in planned.narrowed:
        into = read_basis(folder, name, work.journal.journal).into
        found = into if found is None else found @ into
    return None if found is None else found.to(work.device, torch.float32)


def read_basis(folder: Path, name: str, journal: Journal) -> Basis:
    """The basis that a pass found; OutputError when its file is not what was recorded."""
    path, facts = basis_path(folder, name), journal.passes[name].units[BASIS]
    try:
        held = path.read_bytes()
    except OSError as error:
        raise OutputError(
            f"cannot read {path}: {error.strerror or error}; remove {folder} and start again"
        ) from error
    if hashlib.sha256(held).hexdigest() != facts["sha256"]:
        raise OutputError(
            f"{path} was changed while the run was stopped; remove {folder} and start again"
        )
    tensors = load(held)
    return Basis(tensors["directions"], float(facts["share"]), tensors.get("scale"))
