"""What a budget of a whole file chooses among: the types of each tensor of the blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from compress.arch.spec import LinearSpec
from compress.checkpoint.outline import Outline
from compress.formats.gguf.layout import ENDS
from compress.formats.weights import DenseWeights
from compress.methods.k_quants import KQuantsStageConfig, TypeOfLayers
from compress.plan.whole.file import file_plan
from compress.plan.whole.types import types_of
from compress.quant.ggml_kinds import KINDS, Kind
from compress.quant.ggml_mixtures import fitting, type_of
from compress.recipe import Recipe, Stage
from compress.recipe.placing import placed
from compress_exporters.gguf.head import padded
from compress_exporters.gguf.plan import GgufPlan


@dataclass(frozen=True, slots=True)
class Tensor:
    """One of the file that holds linears of a block, all experts of a role in one. kinds: that it
    may have; sizes: bytes up to where the next tensor begins, under each."""

    linears: tuple[LinearSpec, ...]
    block: int
    kinds: tuple[Kind, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choosable:
    """rest: bytes of the file besides the tensors."""

    tensors: tuple[Tensor, ...]
    rest: int


def choosable(recipe: Recipe, stage: Stage, model: Outline, given: Outline) -> Choosable:
    """As `plan_whole`, before types are chosen. A candidate that a tensor's rows are no whole
    blocks of stands for what llama.cpp takes in its place."""
    assert given.checkpoint is not None, "the source of a run was read from a checkpoint"
    outlined = replace(given.checkpoint, config=dict(model.config), tensors=model.tensors)
    with placed(recipe, "output.format"):
        found = file_plan(DenseWeights(outlined, model.spec), stage, given.checkpoint.path)
    tensors = tuple(_tensors(found, stage))
    return Choosable(tensors, found.map.size - _taken(found, tensors))


def with_types(stage: Stage, chosen: Mapping[str, str]) -> Stage:
    """The stage with the types that were chosen by layer, behind those that it names itself."""
    config = stage.config
    assert isinstance(config, KQuantsStageConfig), "no other method rounds whole models"
    layers: dict[str, list[str]] = {}
    for name, kind in chosen.items():
        layers.setdefault(kind, []).append(name)
    found = tuple(TypeOfLayers(kind, tuple(layers[kind])) for kind in KINDS if kind in layers)
    settled = replace(config, types=(*config.types, *found), candidates=())
    return replace(stage, config=settled, target=None, sensitivity="output_error")


def _tensors(found: GgufPlan, stage: Stage) -> list[Tensor]:
    config, spec = stage.config, found.source.spec
    assert isinstance(config, KQuantsStageConfig), "no other method rounds whole models"
    fixed, names = types_of(stage, spec), [type_of(x, "candidates") for x in config.candidates]
    linears = {x.tensor: (block.index, x) for block in spec.blocks for x in block.linears}
    tensors = []
    for piece in found.pieces:
        its_own = piece.name in found.fresh and not fixed.keys() & set(piece.sources)
        if not its_own or piece.name in ENDS:
            continue
        kinds = tuple(KINDS[x] for x in dict.fromkeys(fitting(n, piece.shape[-1]) for n in names))
        sizes = tuple(padded(kind.nbytes(piece.numel)) for kind in kinds)
        held = [linears[name] for name in piece.sources]
        tensors.append(Tensor(tuple(x for _, x in held), held[0][0], kinds, sizes))
    return tensors


def _taken(found: GgufPlan, tensors: tuple[Tensor, ...]) -> int:
    """Bytes of the tensors in the file that was planned."""
    names = {x.tensor for each in tensors for x in each.linears}
    return sum(
        padded(KINDS[kind].nbytes(piece.numel))
        for piece, kind in zip(found.pieces, found.kinds, strict=True)
        if not names.isdisjoint(piece.sources)
    )
