"""A block whose attention comes into another class: its tensors before anything is refitted."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from compress.blocks.walk import LoadedBlock
from compress.checkpoint.outline import Outline
from compress.edits.latent.evidence import AttentionEvidence
from compress.edits.latent.stock import attention_path
from compress.edits.repair.ridge import Affine
from compress.passes.context import block_tensors
from compress.passes.ranks import decided
from compress.passes.structure.attention.latents import PARTS
from compress.passes.structure.observe import affine_of
from compress.passes.structure.tokens import ReadsModel

# Of the model that the pass reads, its "q", "k" and "v", and what is seen of the attention they
# make: the tensors that take their place, by their names below attention.
Landing = Callable[[Outline, Mapping[str, Affine], AttentionEvidence], Mapping[str, Tensor]]


def landed_tensors(
    work: ReadsModel, source: Outline, read: LoadedBlock, seen: AttentionEvidence, land: Landing
) -> dict[str, Tensor]:
    """By their names in the result; new ones in fp32. read: of the model that the pass reads;
    seen: of its attention."""
    linears = [x for x in read.spec.linears if x.role in PARTS]
    parts = {x.role: affine_of(read, x) for x in linears}
    made = decided(work.ranks, partial(land, source, parts, seen))
    path, gone = attention_path(read.spec), {x.name for x in linears}
    tensors = {f"{path}.{name}": value.float().cpu() for name, value in made.items()}
    for name in block_tensors(read.spec):
        if name.rpartition(".")[0] not in gone:
            tensors[name] = work.weights.checkpoint.read(name, check_finite=True)
    return tensors
