"""Which type every tensor of a file takes: codes as they are, 16 or 32 bits, or blocks that dense
numbers are rounded into."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from compress.arch.forward.forward import ForwardSpec
from compress.errors import RecipeError
from compress.formats.gguf.blocks import kind_of, needs_codes, offsets, why_not_blocks
from compress.formats.gguf.layout import ENDS, Piece
from compress.formats.scales import ScaleRounding, change
from compress.formats.weights import Weights
from compress.quant.ggml_kinds import KINDS
from compress.quant.ggml_mixtures import TensorPlace, TypeMixture, fitting
from compress_exporters.exporter import Options

DENSE = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
ENDS_BY_DEFAULT = "Q8_0"
# llama.cpp's models of 70 B, by their architecture's name and number of layers.
LARGE = (("llama", 80), ("qwen2", 80))


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """kind: a key of KINDS. fresh: dense numbers are rounded into its blocks here. reason: why
    codes of the checkpoint become dense. wanted: the type in whose place the kind is, as rows are
    no whole blocks of it. scales: what fp16 does to those of codes. inputs: linears whose inputs
    the checkpoint rounds."""

    piece: Piece
    kind: str
    fresh: bool = False
    reason: str | None = None
    wanted: str | None = None
    scales: ScaleRounding = field(default_factory=ScaleRounding)
    inputs: int = 0


@dataclass(frozen=True, slots=True)
class TypeChooser:
    """What decides. architecture: its name in GGUF. head_apart: the file has a head that is not
    the embedding. mixture: that the user asks for; weighed: importance of columns is known. types:
    of some weights by name, in place of the mixture's."""

    source: Weights
    how: ForwardSpec
    architecture: str
    options: Options
    head_apart: bool
    mixture: TypeMixture | None = None
    weighed: bool = False
    types: Mapping[str, str] = field(default_factory=dict)

    @property
    def plain(self) -> str:
        """The type of what stays dense. Without a word F16, also of numbers in bf16: fp16 changes
        those below 2^-17 alone (181 of tale-6m's 6.2 million, by less than 2^-25), and llama.cpp
        rounds inputs to a weight's type: with BF16 its log-probabilities of tale-6m are 0.069 away,
        with F16 0.0068."""
        return "F16" if self.options.dtype is None else DENSE[self.options.dtype]

    def all(self, pieces: Sequence[Piece]) -> tuple[TypeChoice, ...]:
        """Of each piece. RecipeError for a mixture of what is rounded already."""
        found = tuple(self._one(piece) for piece in pieces)
        coded = [x for x in found if x.reason or (KINDS[x.kind].block > 1 and not x.fresh)]
        if self.mixture is not None and coded:
            raise RecipeError(
                f"{len(coded)} tensors are codes already, {coded[0].piece.name} for one, and"
                f" {self.mixture.name} rounds dense weights; export the dense checkpoint, or leave"
                " --type out"
            )
        return found

    def _one(self, piece: Piece) -> TypeChoice:
        if not piece.matrix:
            return TypeChoice(piece, "F32")
        looks = [_look(self.source, name) for name in piece.sources]
        kinds, inputs = {x.kind for x in looks}, sum(x.inputs for x in looks)
        reason = next((x.reason for x in looks if x.reason is not None), None)
        if reason is None and len(kinds) > 1:
            reason = "experts are stored in different ways"
        if reason is not None:
            return TypeChoice(piece, self.plain, reason=reason, inputs=inputs)
        kind, scales = kinds.pop(), ScaleRounding()
        if kind is None:
            return self._dense(piece)
        for look in looks:
            scales = scales.plus(look.scales)
        return TypeChoice(piece, kind, scales=scales, inputs=inputs)

    def _dense(self, piece: Piece) -> TypeChoice:
        wanted = self._wanted(piece)
        kind = wanted if KINDS[wanted].block == 1 else fitting(wanted, piece.shape[-1])
        if kind == "F16" and self.mixture is None:
            kind = self.plain if wanted != "F16" else kind
        fresh = KINDS[kind].block > 1
        return TypeChoice(piece, kind, fresh=fresh, wanted=wanted if wanted != kind else None)

    def _wanted(self, piece: Piece) -> str:
        named = {self.types[name]: name for name in piece.sources if name in self.types}
        if len(named) > 1:
            raise RecipeError(
                f"{' and '.join(named.values())} get {' and '.join(named)}, and the file has them"
                " in one tensor; give them one type"
            )
        if named:
            return next(iter(named))
        asked = self.options.embedding
        if piece.name in ENDS and asked is not None:
            return asked.upper()
        if self.mixture is not None:
            return self._mixed(self.mixture, piece)
        by_default = piece.name in ENDS and self.options.dtype is None
        return ENDS_BY_DEFAULT if by_default else self.plain

    def _mixed(self, mixture: TypeMixture, piece: Piece) -> str:
        if piece.name in ENDS:
            is_head = piece.name == ENDS[1] or not self.head_apart
            return mixture.head(piece.shape[-1]) if is_head else mixture.base
        return mixture.kind(self._place(piece))

    def _place(self, piece: Piece) -> TensorPlace:
        _, layer, part, *_ = piece.name.split(".")
        spec, heads = self.source.spec, self.how.grouped(int(layer))
        layers = len(spec.blocks)
        return TensorPlace(
            part,
            int(layer),
            layers,
            experts=spec.experts,
            sharing=heads.heads // heads.kv_heads,
            large=(self.architecture, layers) in LARGE,
            weighed=self.weighed,
        )


@dataclass(frozen=True, slots=True)
class _Look:
    """At one weight. kind: of its blocks, None where it is dense in the checkpoint, or no block
    holds it, for that reason. inputs: whether the checkpoint rounds them."""

    kind: str | None = None
    reason: str | None = None
    inputs: bool = False
    scales: ScaleRounding = field(default_factory=ScaleRounding)


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


def all_scales(choices: Sequence[TypeChoice]) -> ScaleRounding:
    """What fp16 does to the scales of all weights that are stored as codes."""
    found = ScaleRounding()
    for choice in choices:
        found = found.plus(choice.scales)
    return found


def changes(source: Weights, choice: TypeChoice) -> bool:
    """Whether 16 bits may change numbers of a tensor: those of another dtype, or decoded codes."""
    if choice.kind not in ("F16", "BF16"):
        return False
    found = source.checkpoint.tensors
    dtypes = {found[name].dtype if name in found else "" for name in choice.piece.sources}
    return choice.reason is not None or dtypes != {choice.kind}


def most(choices: Sequence[TypeChoice]) -> str:
    """The type of most numbers of matrices."""
    sizes: dict[str, int] = {}
    for choice in choices:
        if choice.piece.matrix:
            sizes[choice.kind] = sizes.get(choice.kind, 0) + choice.piece.numel
    return max(sizes, key=sizes.__getitem__)
