"""ForwardSpec: how a decoder computes, as data. Facts are those of transformers 5.23."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from compress.arch.forward.activations import ACTIVATIONS
from compress.arch.forward.kinds import Grouped, Latent, LayerKind
from compress.arch.forward.rope import Rope
from compress.arch.forward.table import FORWARDS, Forward, Norms
from compress.arch.forward.values import flag, number, optional, refuse, whole
from compress.arch.forward.windows import windows_of
from compress.arch.names import join
from compress.arch.spec import BlockSpec, DecoderSpec
from compress.arch.text_config import config_at
from compress.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Positions:
    """Learned positions: the tensor, and which of its rows is of position 0."""

    tensor: str
    offset: int


@dataclass(frozen=True, slots=True)
class ForwardSpec:
    """What a decoder computes with its weights, free of any architecture's names.

    rows: the kinds of layers that there are, each once, in order of the first layer of each.
    kinds: of each block the number of its row.
    norm: "rms" or "layer", with eps. norm_offset: what an RMS norm adds to its weight (gemma: 1).
    norm_late: its weight multiplies in fp32, before the result is rounded.
    norms: which norms a block has; see Norms.
    rotate_late: queries and keys are rotated in fp32, whatever the dtype.
    activation: a name of transformers'. gated: act(gate) * up, else act(up).
    parallel: attention and MLP read the same residual, each through its own norm.
    positions: None where positions are not learned.
    embedding_scale: what embeddings are multiplied by. final_softcap: of the logits.
    experts_per_token: 0 without a mixture. norm_topk: the chosen experts' weights add up to 1.
    """

    rows: tuple[LayerKind, ...]
    kinds: tuple[int, ...]
    norm: Literal["rms", "layer"]
    eps: float
    norm_offset: float
    norm_late: bool
    norms: Norms
    rotate_late: bool
    activation: str
    gated: bool
    parallel: bool
    positions: Positions | None
    embedding_scale: float
    final_softcap: float | None
    experts_per_token: int
    norm_topk: bool

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each block."""
        return tuple(self.rows[kind] for kind in self.kinds)

    def grouped(self, layer: int) -> Grouped:
        """The kind of a layer, for what computes attention over heads and nothing else.

        Raises CheckpointError, with the layer, for any other kind.
        """
        kind = self.rows[self.kinds[layer]]
        if isinstance(kind, Latent):
            raise CheckpointError(
                f"layer {layer} has latent attention, which is rounded, evaluated, exported to onnx"
                " and tensorrt and run by the engine; kv_cache and edits of heads take keys and"
                " values of heads"
            )
        if not isinstance(kind, Grouped):
            raise CheckpointError(
                f"layer {layer} is of the kind {type(kind).__name__}; layers of the kind Grouped"
                " are computed here"
            )
        return kind

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct rotations, in order of the first layer that has each."""
        found: list[Rope] = []
        for row in self.rows:
            if row.rope is not None and row.rope not in found:
                found.append(row.rope)
        return tuple(found)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows, in order of the first layer that has each: groups of layers whose
        keys and values are kept equally long."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))

    def variant(self, length: int) -> int:
        """Texts that came with lengths of one variant may share keys and values."""
        return max((rope.variant(length) for rope in self.ropes), default=0)

    def group(self, layer: int) -> int:
        """Which of `windows` a layer has."""
        return self.windows.index(self.layers[layer].window)


@dataclass(frozen=True, slots=True)
class Routing:
    """How the router of a mixture shares a token out: by a softmax over all experts, to those with
    the largest shares.

    chosen: how many these are. normalised: their shares are scaled to add up to 1.
    """

    chosen: int
    normalised: bool


def routing_of(config: Mapping[str, Any], spec: DecoderSpec) -> Routing:
    """Of a mixture of a family that is in the tables. config: config.json."""
    row, text = FORWARDS[spec.family], config_at(config, spec.text_config)
    return Routing(_experts(row, text, spec), _normalised(row, text))


def describe_forward(config: Mapping[str, Any], spec: DecoderSpec) -> ForwardSpec:
    """How the decoder of a checkpoint computes. config: config.json. spec: as `describe` gave it.

    Raises CheckpointError, with key, value and remedy, for a family that is in no table, and for a
    value that the tables do not know.
    """
    row = FORWARDS.get(spec.family)
    if row is None:
        raise CheckpointError(
            f"model type {spec.model_type!r} is in no table of forwards; it runs in transformers"
            f" only, known are {', '.join(FORWARDS)}"
        )
    text = config_at(config, spec.text_config)
    _refuse_unknown(row, text)
    rows, kinds = _numbered(_layers(row, text, spec))
    return ForwardSpec(
        rows=rows,
        kinds=kinds,
        norm=row.norm,
        eps=number(text, *row.eps),
        norm_offset=row.norm_offset,
        norm_late=row.norm_late,
        norms=row.norms,
        rotate_late=row.rotate_late,
        activation=_activation(row, text),
        gated=row.gated,
        parallel=row.parallel is not None and flag(text, *row.parallel),
        positions=_positions(row, spec),
        embedding_scale=spec.hidden**0.5 if row.scaled_embedding else 1.0,
        final_softcap=None if row.final_softcap is None else optional(text, *row.final_softcap),
        experts_per_token=_experts(row, text, spec),
        norm_topk=_normalised(row, text),
    )


def _refuse_unknown(row: Forward, text: Mapping[str, Any]) -> None:
    for key in row.must_be_off:
        if text.get(key):
            raise refuse(key, text[key], "a decoder that needs it runs in transformers only")


def _layers(row: Forward, text: Mapping[str, Any], spec: DecoderSpec) -> Sequence[LayerKind]:
    """The kind of each block, by its sizes and by the family's rules."""
    windows = windows_of(row.windows, text, len(spec.blocks))
    ropes = row.ropes(text, spec)
    if any(block.sizes.latent for block in spec.blocks):
        return [_latent(row, text, *of) for of in zip(spec.blocks, ropes, strict=True)]
    softcap = None if row.softcap is None else optional(text, *row.softcap)
    return [
        Grouped(
            heads=block.sizes.heads,
            kv_heads=_kv_heads(text, block),
            key_width=block.sizes.key_width,
            value_width=block.sizes.value_width,
            window=window,
            rope=rope,
            scale=row.scale(text, block.sizes.key_width, block.index),
            softcap=softcap,
            qk_norm=row.qk_norm,
            qkv=row.qkv,
        )
        for block, window, rope in zip(spec.blocks, windows, ropes, strict=True)
    ]


def _latent(row: Forward, text: Mapping[str, Any], block: BlockSpec, rope: Rope | None) -> Latent:
    sizes = block.sizes
    assert sizes.latent is not None, "blocks of a family are of one kind"
    if sizes.kv_heads != sizes.heads:
        raise refuse("num_key_value_heads", sizes.kv_heads, f"it must be {sizes.heads}, all heads")
    return Latent(
        heads=sizes.heads,
        rank=sizes.latent.rank,
        rotated=sizes.latent.rotated,
        nope=sizes.of("nope"),
        value_width=sizes.value_width,
        query_rank=sizes.latent.query_rank or None,
        rope=rope,
        interleaved=flag(text, *row.interleaved),
        scale=row.scale(text, sizes.key_width, block.index),
        eps=row.latent_eps,
    )


def _kv_heads(text: Mapping[str, Any], block: BlockSpec) -> int:
    heads, kv_heads = block.sizes.heads, block.sizes.kv_heads
    if heads % kv_heads:
        listed = isinstance(text.get("num_key_value_heads"), list)
        place = f"num_key_value_heads{f'[{block.index}]' if listed else ''}"
        raise refuse(place, kv_heads, f"it must divide the {heads} heads")
    return kv_heads


def _numbered(layers: Sequence[LayerKind]) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The distinct kinds, and of each layer the number of its own."""
    rows: list[LayerKind] = []
    for layer in layers:
        if layer not in rows:
            rows.append(layer)
    return tuple(rows), tuple(rows.index(layer) for layer in layers)


def _activation(row: Forward, text: Mapping[str, Any]) -> str:
    key, default = row.activation
    name = text.get(key)
    name = default if name is None else name
    if name not in ACTIVATIONS:
        raise refuse(key, name, f"known are {', '.join(ACTIVATIONS)}")
    return str(name)


def _positions(row: Forward, spec: DecoderSpec) -> Positions | None:
    if row.positions is None:
        return None
    name, offset = row.positions
    beside = spec.embedding.removesuffix(".weight").rpartition(".")[0]
    return Positions(join(beside, name) + ".weight", offset)


def _experts(row: Forward, text: Mapping[str, Any], spec: DecoderSpec) -> int:
    experts = min((x.sizes.experts for x in spec.blocks if x.sizes.experts), default=0)
    if not experts or row.experts_per_token is None:
        return 0
    chosen = whole(text, "num_experts_per_tok", row.experts_per_token)
    if chosen > experts:
        raise refuse("num_experts_per_tok", chosen, f"there are {experts} experts")
    return chosen


def _normalised(row: Forward, text: Mapping[str, Any]) -> bool:
    return row.norm_topk is not None and flag(text, *row.norm_topk)
