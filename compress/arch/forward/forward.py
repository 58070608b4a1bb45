"""ForwardSpec: how a decoder computes, as data. Facts are those of transformers 5.23."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from compress.arch.forward.activations import ACTIVATIONS
from compress.arch.forward.rope import Rope
from compress.arch.forward.table import FORWARDS, Forward, Norms
from compress.arch.forward.values import flag, number, optional, refuse, whole
from compress.arch.forward.windows import windows_of
from compress.arch.names import join
from compress.arch.spec import DecoderSpec
from compress.arch.text_config import config_at
from compress.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class AttentionForward:
    """One layer's attention.

    window: positions that a token sees, itself included; None for all before it.
    rope: None where queries and keys are not rotated.
    scale: what the products of queries and keys are multiplied by.
    softcap: c of c * tanh(score / c), None without.
    """

    window: int | None
    rope: Rope | None
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Positions:
    """Learned positions: the tensor, and which of its rows is of position 0."""

    tensor: str
    offset: int


@dataclass(frozen=True, slots=True)
class ForwardSpec:
    """What a decoder computes with its weights, free of any architecture's names.

    norm: "rms" or "layer", with eps. norm_offset: what an RMS norm adds to its weight (gemma: 1).
    norm_late: its weight multiplies in fp32, before the result is rounded.
    norms: which norms a block has; see Norms.
    qk_norm: of queries and keys: "head" over each head, "full" over all heads together.
    qkv: how a fused q/k/v lies: "parts" (all of q, then k, then v) or "heads" (of each head).
    rotate_late: queries and keys are rotated in fp32, whatever the dtype.
    activation: a name of transformers'. gated: act(gate) * up, else act(up).
    parallel: attention and MLP read the same residual, each through its own norm.
    positions: None where positions are not learned.
    embedding_scale: what embeddings are multiplied by. final_softcap: of the logits.
    experts_per_token: 0 without a mixture. norm_topk: the chosen experts' weights add up to 1.
    """

    layers: tuple[AttentionForward, ...]
    heads: int
    kv_heads: int
    head_dim: int
    norm: Literal["rms", "layer"]
    eps: float
    norm_offset: float
    norm_late: bool
    norms: Norms
    qk_norm: Literal["head", "full"] | None
    qkv: Literal["parts", "heads"]
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
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows, in order of the first layer that has each: groups of layers whose
        keys and values are kept equally long."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))

    def group(self, layer: int) -> int:
        """Which of `windows` a layer has."""
        return self.windows.index(self.layers[layer].window)


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
    if spec.heads % spec.kv_heads:
        raise refuse("num_key_value_heads", spec.kv_heads, f"it must divide the {spec.heads} heads")
    return ForwardSpec(
        layers=_layers(row, text, spec),
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        norm=row.norm,
        eps=number(text, *row.eps),
        norm_offset=row.norm_offset,
        norm_late=row.norm_late,
        norms=row.norms,
        qk_norm=row.qk_norm,
        qkv=row.qkv,
        rotate_late=row.rotate_late,
        activation=_activation(row, text),
        gated=row.gated,
        parallel=row.parallel is not None and flag(text, *row.parallel),
        positions=_positions(row, spec),
        embedding_scale=spec.hidden**0.5 if row.scaled_embedding else 1.0,
        final_softcap=None if row.final_softcap is None else optional(text, *row.final_softcap),
        experts_per_token=_experts(row, text, spec),
        norm_topk=row.norm_topk is not None and flag(text, *row.norm_topk),
    )


def _refuse_unknown(row: Forward, text: Mapping[str, Any]) -> None:
    for key in row.must_be_off:
        if text.get(key):
            raise refuse(key, text[key], "a decoder that needs it runs in transformers only")


def _layers(
    row: Forward, text: Mapping[str, Any], spec: DecoderSpec
) -> tuple[AttentionForward, ...]:
    count = len(spec.blocks)
    windows = windows_of(row.windows, text, count)
    ropes = row.ropes(text, spec, count)
    softcap = None if row.softcap is None else optional(text, *row.softcap)
    return tuple(
        AttentionForward(window, rope, row.scale(text, spec.head_dim, index), softcap)
        for index, (window, rope) in enumerate(zip(windows, ropes, strict=True))
    )


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
    if not spec.experts or row.experts_per_token is None:
        return 0
    chosen = whole(text, "num_experts_per_tok", row.experts_per_token)
    if chosen > spec.experts:
        raise refuse("num_experts_per_tok", chosen, f"there are {spec.experts} experts")
    return chosen
