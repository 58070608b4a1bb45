"""The file of a basis: what a pass found to narrow the residual stream by.

It stays until the run ends, and the journal has its hash: what is left of a killed run goes on with
the same basis, and a pass behind brings the source's states into it.
"""

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from compress.edits.repair.rotation import Basis
from compress.passes.context import PassContext, record_unit
from compress.passes.ranks import decided
from compress.passes.structure.files import BASIS, basis_path, keep, read_kept
from compress.passes.structure.tokens import ReadsModel
from compress.plan.passes import PassPlan


def keep_basis(work: PassContext, planned: PassPlan, folder: Path, basis: Basis) -> None:
    """Write the basis of a pass, and record it."""
    scale = {} if basis.scale is None else {"scale": basis.scale}
    tensors = {"directions": basis.directions, **scale}
    held = save({name: value.cpu().contiguous() for name, value in tensors.items()})
    path = basis_path(folder, planned.name)
    sha256 = decided(work.ranks, partial(keep, path, held))
    record_unit(work, BASIS, {"sha256": sha256, "share": basis.share})


def basis_before(work: ReadsModel, planned: PassPlan, folder: Path) -> Tensor | None:
    """What brings the source's stream into that of the model which a pass reads: fp32
    [source's hidden, hidden]; None where no pass before it narrowed or scaled the stream."""
    found: Tensor | None = None
    for name in planned.narrowed:
        into = read_basis(work, folder, name).into
        found = into if found is None else found @ into
    if found is None and planned.streamed != 1:
        found = torch.eye(planned.source.spec.hidden, device=work.device)
    return None if found is None else found.float() * planned.streamed


def read_basis(work: ReadsModel, folder: Path, name: str) -> Basis:
    """The basis that pass `name` found; OutputError when its file is not what was recorded."""
    path, facts = basis_path(folder, name), work.journal.journal.passes[name].units[BASIS]
    held = load(read_kept(path, facts["sha256"]))
    tensors = {key: value.to(work.device) for key, value in held.items()}
    return Basis(tensors["directions"], float(facts["share"]), tensors.get("scale"))
