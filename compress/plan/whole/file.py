"""A result that is one GGUF file: what becomes of every tensor, known to the byte."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from compress.arch.spec import LinearSpec
from compress.checkpoint import ShardLayout
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.header import TensorInfo
from compress.checkpoint.shards.layout import Entry, ShardFile
from compress.errors import RecipeError
from compress.formats.weights import DenseWeights, Weights
from compress.methods import METHODS
from compress.methods.k_quants import KQuantsStageConfig
from compress.plan.layers import Skipped
from compress.plan.whole.types import types_of
from compress.quant.ggml_kinds import KINDS
from compress.recipe import Recipe, Stage
from compress.recipe.placing import placed
from compress_exporters.exporter import Options, require
from compress_exporters.gguf.plan import GgufPlan, make_plan
from compress_exporters.gguf.write import FILE

NAME = "gguf"


@dataclass(frozen=True, slots=True)
class BlocksPlan:
    """One weight that will be rounded into blocks. kind: a key of KINDS. bytes: on disk."""

    linear: LinearSpec
    block: int | None
    method: str
    kind: str
    bytes_before: int
    bytes_after: int

    @property
    def how(self) -> str:
        """How it is stored, in words."""
        return self.kind


@dataclass(frozen=True, slots=True, eq=False)
class WholeFile:
    """modules: weights that are rounded; skipped: linears that stay dense. tensors: for every
    tensor of the model the entries (name in the file, kind, shape) that it becomes, or is a part
    of. layout: of the file. notes: what a user should read."""

    modules: tuple[BlocksPlan, ...]
    skipped: tuple[Skipped, ...]
    tensors: Mapping[str, tuple[Entry, ...]]
    layout: ShardLayout
    notes: tuple[str, ...]

    @property
    def rounded(self) -> Mapping[str, int]:
        """How many weights become blocks of each kind."""
        found: Counter[str] = Counter()
        for module in self.modules:
            found[module.kind] += prod(module.linear.shape)
        return found


def whole_stage(recipe: Recipe) -> Stage | None:
    """The stage that rounds the whole model into one file."""
    return next((x for x in recipe.stages if METHODS[x.method].whole), None)


def plan_whole(recipe: Recipe, stage: Stage, model: Outline, given: Outline) -> WholeFile:
    """Raises RecipeError or CheckpointError for a model that GGUF, or the type, has no place for.

    model: what is rounded. given: the run's source, whose tokenizer goes into the file.
    """
    require("gguf", "gguf", "gguf")
    assert given.checkpoint is not None, "the source of a run was read from a checkpoint"
    # Told by names and shapes: what edits will make is not there yet.
    outlined = replace(given.checkpoint, config=dict(model.config), tensors=model.tensors)
    with placed(recipe, "output.format"):
        source = DenseWeights(outlined, model.spec)
        return _whole(file_plan(source, stage, given.checkpoint.path), model, stage)


def file_plan(source: Weights, stage: Stage, called: Path) -> GgufPlan:
    """The file of a model. called: the folder that names it."""
    config = stage.config
    assert isinstance(config, KQuantsStageConfig), "no other method rounds whole models"
    calibrated = METHODS[stage.method].needs(config).data
    options, types = Options(type=config.type), types_of(stage, source.spec)
    return make_plan(source, options, calibrated=calibrated, called=called, types=types)


def _whole(found: GgufPlan, model: Outline, stage: Stage) -> WholeFile:
    spec, to_round = model.spec, found.to_round.weights
    if not to_round:
        raise RecipeError(f"no weight has rows that are whole blocks of {stage.config.type}")
    blocks = {x.tensor: block.index for block in spec.blocks for x in block.linears}
    modules, skipped = [], []
    tensors = _tensors(found, model)
    for linear in spec.all_linears():
        block, name = blocks.get(linear.tensor), linear.tensor
        if name not in to_round:
            skipped.append(Skipped(linear, block, _why(tensors[name])))
            continue
        kind, (rows, columns) = to_round[name]
        before, after = model.tensors[name].nbytes, KINDS[kind].nbytes(rows * columns)
        modules.append(BlocksPlan(linear, block, stage.method, kind, before, after))
    return WholeFile(tuple(modules), tuple(skipped), tensors, _layout(found), (*found.notes,))


def _why(entries: tuple[Entry, ...]) -> str:
    """Why a linear is not rounded."""
    if not entries:
        return "no part of the file"
    _, kind, shape = entries[0]
    if kind == "F32":
        return "llama.cpp has it in fp32"
    return f"its rows of {shape[-1]} numbers are no whole blocks"


def _tensors(found: GgufPlan, model: Outline) -> dict[str, tuple[Entry, ...]]:
    entries: dict[str, tuple[Entry, ...]] = dict.fromkeys(model.tensors, ())
    for piece, kind in zip(found.pieces, found.kinds, strict=True):
        for name in piece.sources:
            entries[name] = (*entries[name], (piece.name, kind, piece.shape))
    return entries


def _layout(found: GgufPlan) -> ShardLayout:
    place = found.map
    infos = tuple(_infos(found, place.starts))
    file = ShardFile(FILE, place.head, infos, place.size)
    return ShardLayout((file,), {info.name: info for info in infos})


def _infos(found: GgufPlan, starts: tuple[int, ...]) -> Iterator[TensorInfo]:
    for piece, kind, start in zip(found.pieces, found.kinds, starts, strict=True):
        size = KINDS[kind].nbytes(piece.numel)
        yield TensorInfo(piece.name, kind, piece.shape, FILE, start, size)
