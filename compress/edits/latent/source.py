"""Which attention can become latent attention of the stock class, and what is known of it."""

from collections.abc import Iterator
from dataclasses import dataclass

from compress.arch.forward.forward import ForwardSpec, describe_forward
from compress.arch.forward.kinds import Grouped
from compress.arch.forward.norms import stream_norms
from compress.arch.forward.rope import Rope
from compress.arch.spec import BlockSpec
from compress.checkpoint.outline import Outline
from compress.errors import CheckpointError

ROLES = frozenset({"q", "k", "v", "o", "gate", "up", "down"})
# Rotations whose frequencies do not depend on the length of the text.
KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class SourceAttention:
    """What all layers of a model have, that latent attention can take the place of.

    kind: their forward; rope: its rotation. biased: whether any of its linears has a bias.
    """

    kind: Grouped
    rope: Rope
    biased: bool

    @property
    def keys(self) -> int:
        """Numbers of the keys of a token: as many rotated ones lose nothing."""
        return self.kind.kv_heads * self.kind.key_width

    @property
    def values(self) -> int:
        """Numbers of the values of a token: as large a latent loses nothing beside these keys."""
        return self.kind.kv_heads * self.kind.value_width

    @property
    def scale(self) -> float:
        """Of a product of a query and a key, by their rotation too."""
        return self.kind.turned_scale


def attention_of(source: Outline) -> SourceAttention:
    """CheckpointError, with what is in the way, for a model whose computation the class does not
    have, and for fp16."""
    if source.spec.blocks[0].sizes.latent is not None:
        raise CheckpointError(f"{source.spec.model_type} has latent attention already")
    forward = describe_forward(source.config, source.spec)
    in_the_way = next(_in_the_way(source, forward), None)
    if in_the_way is not None:
        raise CheckpointError(
            f"{source.spec.model_type} has {in_the_way}, which DeepseekV3ForCausalLM does not"
            " compute; mla takes models like llama, mistral and qwen2"
        )
    if source.main_dtype == "F16":
        raise CheckpointError(
            "the model is stored in fp16, which has no numbers as small as those that make a"
            " latent; put {method: cast, dtype: bf16} before it"
        )
    kind = forward.grouped(0)
    assert kind.rope is not None, "just looked at"
    biased = any(_bias_of(block, "self_attn.") for block in source.spec.blocks)
    return SourceAttention(kind, kind.rope, biased)


def _in_the_way(source: Outline, forward: ForwardSpec) -> Iterator[str]:
    """What the class does not have, in words."""
    if not stream_norms(source.config, source.spec).pass_rotations or forward.norm_offset:
        yield "other norms than an RMS norm before attention and one before the MLP"
    if forward.experts_per_token:
        yield "a mixture of experts"
    if forward.final_softcap or forward.embedding_scale != 1 or forward.positions is not None:
        yield "a soft cap, scaled embeddings or learned positions"
    for block in source.spec.blocks:
        missing = ROLES - {x.role for x in block.linears}
        if missing:
            yield f"no linears of their own for {', '.join(sorted(missing))}"
        if block.unrecognised:
            yield f"a tensor that is in no table, {block.unrecognised[0]}"
        bias = _bias_of(block, "mlp.")
        if bias:
            yield f"biases in its MLP, {bias}"
        yield from _of_layer(forward.grouped(block.index))
    if len(forward.rows) > 1:
        yield "layers that compute attention in several ways"


def _of_layer(kind: Grouped) -> Iterator[str]:
    if kind.qk_norm is not None:
        yield "norms over queries and keys"
    if kind.softcap is not None:
        yield "a soft cap of scores"
    if kind.window is not None:
        yield f"a window of {kind.window} tokens"
    if kind.rope is None:
        yield "layers that rotate nothing"
    elif kind.rope.dim != kind.key_width:
        yield f"a rotation of {kind.rope.dim} of {kind.key_width} numbers of a head"
    elif kind.rope.kind not in KINDS or kind.rope.length is not None:
        yield f"a rotation that depends on the length of the text ({kind.rope.kind})"


def _bias_of(block: BlockSpec, below: str) -> str:
    """The first bias of linears at a path below the block; "" without one."""
    found = (t for t, path in block.modules if path.startswith(below) and path.endswith(".bias"))
    return next(found, "")
