"""The last step of every description: its parts become one DecoderSpec."""

from collections.abc import Sequence
from dataclasses import dataclass

from compress.arch.names import Shapes
from compress.arch.sizes import Sizes
from compress.arch.spec import BlockSpec, DecoderSpec


@dataclass(frozen=True, slots=True)
class Outside:
    """Tensors a forward needs beside the blocks; `pairs` as DecoderSpec.outside, head included."""

    embedding: str
    final_norm: str | None
    head: str | None
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class DecoderKind:
    """What a decoder is called: its row of the tables ("generic" for none), the model_type of its
    config, and the keys that lead to that in config.json."""

    family: str
    model_type: str
    path: tuple[str, ...]


def assemble(
    kind: DecoderKind,
    sizes: Sizes,
    outside: Outside,
    blocks: Sequence[BlockSpec],
    tensors: Shapes,
) -> DecoderSpec:
    """DecoderSpec; what no part names is `copied`."""
    used = {tensor for tensor, _ in outside.pairs}
    for block in blocks:
        used.update(tensor for tensor, _ in block.modules)
        used.update(block.unrecognised)
    vocab, hidden = tensors[outside.embedding][:2]
    head = None if outside.head is None else tensors[outside.head]
    return DecoderSpec(
        family=kind.family,
        model_type=kind.model_type,
        text_config=kind.path,
        hidden=sizes.hidden or hidden,
        vocab=sizes.vocab or vocab,
        context=sizes.context,
        experts_per_token=sizes.experts_per_token,
        tied=outside.head is None,
        embedding=outside.embedding,
        embedding_shape=(tensors[outside.embedding][0], tensors[outside.embedding][1]),
        final_norm=outside.final_norm,
        head=outside.head,
        head_shape=None if head is None else (head[0], head[1]),
        outside=outside.pairs,
        blocks=tuple(blocks),
        copied=tuple(name for name in tensors if name not in used),
    )
