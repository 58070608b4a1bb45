"""What a GGUF file of a checkpoint holds: every tensor with its kind, before a byte is written."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec, describe_forward
from compress.errors import CheckpointError, RecipeError
from compress.formats.gguf.arches import Arch
from compress.formats.gguf.fields import Fields
from compress.formats.gguf.layout import ENDS, Piece, pieces
from compress.formats.scales import ScaleRounding
from compress.formats.weights import Weights
from compress.quant.ggml_kinds import KINDS, Kind
from compress.quant.ggml_mixtures import TypeMixture, mixture_of
from compress.quant.tensor import QuantizedTensor
from compress_exporters.decoded import decoded
from compress_exporters.exporter import Options, RoundedRows
from compress_exporters.gguf.head import FileMap, map_file
from compress_exporters.gguf.imatrix import matched, read_imatrix
from compress_exporters.gguf.model import arch_of, check_model, settings
from compress_exporters.gguf.rotations import rotations
from compress_exporters.gguf.rounding import require_fp16
from compress_exporters.gguf.tokenizer.tokenizer import model_name, vocabulary
from compress_exporters.gguf.types.choice import TypeChooser, all_scales, changes, most
from compress_exporters.gguf.types.told import shown, told

# The note on a mixture that is rounded without data.
ALIKE = (
    "errors of all columns weigh alike; --text FILE rounds by what they multiply and makes up for"
    " losses, --imatrix FILE weighs them"
)


@dataclass(frozen=True, slots=True)
class GgufPlan:
    """kinds: of each piece, a key of KINDS. fields: all keys of the file.

    rounded: what fp16 does to scales, over all weights that are stored as codes. fresh: names of
    the pieces whose dense numbers are rounded into blocks here. exact: all others mean the very
    numbers of the checkpoint. importance: of the columns of fresh ones that it is known of, fp32
    [experts or 1, K]; it says what their errors weigh. given: their rows, where they were rounded
    elsewhere.
    """

    source: Weights
    how: ForwardSpec
    arch: Arch
    pieces: tuple[Piece, ...]
    kinds: tuple[str, ...]
    fields: Fields
    notes: tuple[str, ...]
    rounded: ScaleRounding
    fresh: frozenset[str]
    exact: bool
    importance: Mapping[str, Tensor] = field(default_factory=dict)
    given: RoundedRows | None = None

    @property
    def map(self) -> FileMap:
        """Where everything lies in the file."""
        return map_file(self.pieces, self.kinds, self.fields)

    @property
    def to_round(self) -> "ToRound":
        """What is rounded into blocks."""
        found: dict[str, tuple[str, tuple[int, int]]] = {}
        for piece, kind in zip(self.pieces, self.kinds, strict=True):
            if piece.name in self.fresh:
                shape = piece.shape[-2], piece.shape[-1]
                found |= dict.fromkeys(piece.sources, (kind, shape))
        head = self.head.sources[0]
        return ToRound(found, head if head in found else None)

    @property
    def head(self) -> Piece:
        """What the output head is; a file without one of its own multiplies by the embedding."""
        ends = {piece.name: piece for piece in self.pieces if piece.name in ENDS}
        return ends.get(ENDS[1], ends[ENDS[0]])

    @property
    def multiplied(self) -> tuple[Piece, ...]:
        """The matrices that hidden states are multiplied by: the head, and those of blocks but
        for routers."""
        head = self.head
        return tuple(x for x in self.pieces if x is head or (x.matrix and x.name not in ENDS))


@dataclass(frozen=True, slots=True)
class ToRound:
    """weights: by name in the checkpoint, kind and shape (N, K). head: the one of them that the
    output head multiplies by."""

    weights: Mapping[str, tuple[str, tuple[int, int]]]
    head: str | None


def make_plan(
    source: Weights,
    options: Options,
    *,
    calibrated: bool = False,
    called: Path | None = None,
    types: Mapping[str, str] | None = None,
) -> GgufPlan:
    """Reads scales and zero points, and codes of 8 bits with zero points; no other codes.

    calibrated: weights are rounded elsewhere, by what they read. called: the folder that the model
    is called by, the source's without a word. types: of some weights by name, in place of those
    that the mixture gives them.

    RecipeError or CheckpointError for what does not fit.
    """
    spec, arch = source.spec, arch_of(source.spec)
    how = describe_forward(source.checkpoint.config, spec)
    notes = list(check_model(source, how, arch, options.max_context))
    turned = rotations(how, arch)
    words = vocabulary(source)
    laid = pieces(spec, source.checkpoint.shapes, how, arch, turned.factors)
    _check_head(source, arch)
    chooser = replace(
        _chooser(source, how, arch, laid, options, calibrated), types={} if types is None else types
    )
    choices = chooser.all(laid)
    fresh = frozenset(x.piece.name for x in choices if x.fresh)
    importance = _importance(options, laid, fresh)
    scales = all_scales(choices)
    require_fp16(scales, round_scales=options.round_scales)
    name = model_name(_called((called or source.checkpoint.path).absolute()), words)
    fields = _general(name, arch, KINDS[most(choices)], None if types else chooser.mixture)
    sizes = tuple(settings(spec, how, arch, options.max_context))
    fields += tuple((f"{arch.name}.{key}", value) for key, value in sizes + turned.fields)
    notes += [*turned.notes, *words.notes, *told(chooser, choices)]
    notes += [] if calibrated else _weighed(options, importance, fresh)
    notes += _left(source)
    return GgufPlan(
        source,
        how,
        arch,
        tuple(laid),
        tuple(x.kind for x in choices),
        fields + words.fields,
        tuple(notes),
        scales,
        fresh,
        exact=not scales.changed and not any(changes(source, x) for x in choices),
        importance=importance,
    )


def coded(source: Weights, piece: Piece) -> Iterator[QuantizedTensor]:
    """The quantized weights of a piece, one after the other; none for what is stored dense."""
    for name in piece.sources:
        quantized = source.quantized(name)
        if quantized is not None:
            yield quantized


def dense(source: Weights, piece: Piece, name: str) -> Tensor:
    """One source of a piece, fp32, as the file has it: turned, in order, with what is added."""
    values = decoded(source, name).float()
    values = values.t() if piece.transposed else values
    rows = piece.rows()
    values = values if rows is None else values[rows]
    return (values + piece.added if piece.added else values).contiguous()


def _chooser(
    source: Weights,
    how: ForwardSpec,
    arch: Arch,
    laid: list[Piece],
    options: Options,
    calibrated: bool,
) -> TypeChooser:
    """What decides of types. RecipeError for a mixture that there is not."""
    apart = any(x.name == ENDS[1] and x.sources != (source.spec.embedding,) for x in laid)
    mixture = None if options.type is None else mixture_of(options.type)
    weighed = options.imatrix is not None or calibrated
    if weighed and mixture is None:
        raise RecipeError("--imatrix and --text say what errors of --type weigh; give --type too")
    return TypeChooser(source, how, arch.name, options, apart, mixture, weighed)


def _general(name: str, arch: Arch, usual: Kind, mixture: TypeMixture | None) -> Fields:
    file_type = usual.file_type if mixture is None else mixture.file_type
    fields: Fields = (
        ("general.architecture", arch.name),
        ("general.type", "model"),
        ("general.name", name),
        ("general.file_type", file_type),
    )
    return (*fields, ("general.quantization_version", 2)) if usual.block > 1 else fields


def _called(folder: Path) -> str:
    """The folder's name, as it will be where a run still works in it; in the Hugging Face cache
    (models--who--what/snapshots/hash) the model's."""
    repository = folder.parent.parent.name
    inside = folder.parent.name == "snapshots" and repository.startswith("models--")
    return repository.rpartition("--")[2] if inside else folder.name.removesuffix(".partial")


def _check_head(source: Weights, arch: Arch) -> None:
    spec = source.spec
    if arch.head != "tied" or spec.head is None:
        return
    if not torch.equal(source.read(spec.head), source.read(spec.embedding)):
        raise CheckpointError(
            f"{spec.head} is not the embedding; GGUF's {arch.name} has no output head of its own,"
            " take onnx"
        )


def _importance(options: Options, laid: list[Piece], fresh: frozenset[str]) -> dict[str, Tensor]:
    """Of the rounded pieces that a file knows: fp32 [experts or 1, K]."""
    if options.imatrix is None:
        return {}
    path = Path(options.imatrix)
    return matched(laid, fresh, read_imatrix(path), path)


def _weighed(
    options: Options, importance: Mapping[str, Tensor], fresh: frozenset[str]
) -> Iterator[str]:
    """What the errors of columns weigh."""
    if importance:
        of_all = f"{len(importance)} of {len(fresh)} rounded tensors"
        yield f"errors of {of_all} weigh what their columns multiply"
    elif options.type is not None:
        yield ALIKE


def _left(source: Weights) -> Iterator[str]:
    spec = source.spec
    lost = [*spec.copied, *(name for block in spec.blocks for name in block.unrecognised)]
    if lost:
        yield f"left out, as no part of the decoder, are {len(lost)} of the tensors: {shown(lost)}"
    if source.kv_cache is not None:
        yield "the scales of the key/value cache are left out"
