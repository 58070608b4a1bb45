"""What a GGUF file of a checkpoint holds: every tensor with its kind, before a byte is written."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec, describe_forward
from compress.errors import CheckpointError
from compress.formats.scales import ScaleRounding, change
from compress.formats.weights import Weights
from compress.quant.ggml_kinds import KINDS
from compress.quant.tensor import QuantizedTensor
from compress_exporters.decoded import decoded
from compress_exporters.exporter import Options
from compress_exporters.gguf.arches import Arch
from compress_exporters.gguf.blocks import kind_of, needs_codes, offsets, why_not_blocks
from compress_exporters.gguf.fields import Fields
from compress_exporters.gguf.layout import Piece, pieces
from compress_exporters.gguf.model import arch_of, check_model, settings
from compress_exporters.gguf.rotations import rotations
from compress_exporters.gguf.rounding import require_fp16
from compress_exporters.gguf.tokenizer.tokenizer import model_name, vocabulary

DENSE = {"fp32": "F32", "fp16": "F16"}
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class GgufPlan:
    """kinds: of each piece, a key of KINDS. fields: all keys of the file.

    rounded: what fp16 does to scales, over all weights that are stored as codes.
    """

    source: Weights
    how: ForwardSpec
    arch: Arch
    pieces: tuple[Piece, ...]
    kinds: tuple[str, ...]
    fields: Fields
    notes: tuple[str, ...]
    rounded: ScaleRounding

    @property
    def exact(self) -> bool:
        """Whether the file means the very numbers of the checkpoint."""
        return not self.rounded.changed and "F16" not in self.kinds


@dataclass(slots=True)
class _Gathered:
    """What looking at the weights gathers. dense: reason -> weights that no block holds.

    inputs: linears in blocks whose inputs the checkpoint rounds; lost: those that become dense.
    """

    rounded: ScaleRounding = field(default_factory=ScaleRounding)
    dense: dict[str, list[str]] = field(default_factory=dict)
    inputs: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class _Look:
    """At one weight. kind: of its blocks, None where it is dense in the checkpoint, or no block
    holds it, for that reason. inputs: whether the checkpoint rounds them."""

    kind: str | None = None
    reason: str | None = None
    inputs: bool = False
    rounded: ScaleRounding = field(default_factory=ScaleRounding)


def make_plan(source: Weights, options: Options) -> GgufPlan:
    """Reads scales and zero points, and codes of 8 bits with zero points; no other codes.

    RecipeError or CheckpointError for what does not fit.
    """
    spec, arch = source.spec, arch_of(source.spec)
    how = describe_forward(source.checkpoint.config, spec)
    notes = list(check_model(source, how, arch, options.max_context))
    turned = rotations(how, arch)
    words = vocabulary(source)
    laid = pieces(source, how, arch, turned.factors)
    _check_head(source, arch)
    found = _Gathered()
    kinds = [_kind(source, piece, DENSE[options.dtype], found) for piece in laid]
    require_fp16(found.rounded, round_scales=options.round_scales)
    name = model_name(_called(source.checkpoint.path.absolute()), words)
    fields = _general(name, arch, laid, kinds)
    sizes = tuple(settings(spec, how, arch, options.max_context))
    fields += tuple((f"{arch.name}.{key}", value) for key, value in sizes + turned.fields)
    notes += [*turned.notes, *words.notes, *_told(found, DENSE[options.dtype]), *_left(source)]
    return GgufPlan(
        source,
        how,
        arch,
        tuple(laid),
        tuple(kinds),
        fields + words.fields,
        tuple(notes),
        found.rounded,
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


def _kind(source: Weights, piece: Piece, plain: str, found: _Gathered) -> str:
    if not piece.matrix:
        return "F32"
    looks = [_look(source, name) for name in piece.sources]
    kinds, inputs = {x.kind for x in looks}, sum(x.inputs for x in looks)
    reason = next((x.reason for x in looks if x.reason is not None), None)
    if reason is None and len(kinds) > 1:
        reason = "experts are stored in different ways"
    if reason is not None:
        found.dense.setdefault(reason, []).append(piece.name)
        found.lost += inputs
        return plain
    found.inputs += inputs
    for look in looks:
        found.rounded = found.rounded.plus(look.rounded)
    return kinds.pop() or plain


def _look(source: Weights, name: str) -> _Look:
    weight = source.outlined(name)
    if weight is None:
        return _Look()
    if needs_codes(weight):
        weight = source.quantized(name)
        assert weight is not None
    reason, inputs = why_not_blocks(weight), weight.scheme.activation is not None
    if reason is not None:
        return _Look(None, reason, inputs)
    kind, seen = kind_of(weight), change(weight.scale, torch.float16)
    if kind == "Q4_1":
        seen = seen.plus(change(offsets(weight), torch.float16))
    return _Look(kind, None, inputs, seen)


def _general(name: str, arch: Arch, laid: list[Piece], kinds: list[str]) -> Fields:
    sizes: dict[str, int] = {}
    for piece, kind in zip(laid, kinds, strict=True):
        if piece.matrix:
            sizes[kind] = sizes.get(kind, 0) + piece.numel
    most = KINDS[max(sizes, key=sizes.__getitem__)]
    fields: Fields = (
        ("general.architecture", arch.name),
        ("general.type", "model"),
        ("general.name", name),
        ("general.file_type", most.file_type),
    )
    return (*fields, ("general.quantization_version", 2)) if most.block > 1 else fields


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


def _told(found: _Gathered, plain: str) -> Iterator[str]:
    for reason, names in found.dense.items():
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        yield f"{len(names)} quantized weights become {plain}, as {reason}: {shown}"
    if found.rounded.changed:
        yield (
            f"{found.rounded.changed} of {found.rounded.total} scales and offsets are rounded to"
            f" fp16, the largest change is {found.rounded.largest:.2g} of the value"
        )
    if found.inputs:
        yield (
            f"{found.inputs} linears have quantized inputs in the checkpoint; llama.cpp rounds"
            " inputs its own way"
        )
    if found.lost:
        yield (
            f"{found.lost} linears that become {plain} have quantized inputs in the checkpoint;"
            " in the file theirs are not quantized"
        )


def _left(source: Weights) -> Iterator[str]:
    spec = source.spec
    lost = [*spec.copied, *(name for block in spec.blocks for name in block.unrecognised)]
    if lost:
        shown = ", ".join(lost[:_SHOWN]) + (", ..." if len(lost) > _SHOWN else "")
        yield f"left out, as no part of the decoder, are {len(lost)} of the tensors: {shown}"
    if source.kv_cache is not None:
        yield "the scales of the key/value cache are left out"
