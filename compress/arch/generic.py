"""DecoderSpec of a decoder that is in no table, from names and shapes alone.

Such a model can be quantized (weights only); nothing is known about the meaning of its layers
beyond what their names say plainly.
"""

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from compress.arch.assemble import DecoderKind, Outside, assemble
from compress.arch.names import Shapes, check_recognised, find_head, group_blocks, join
from compress.arch.sizes import BLOCK_KEYS, BlockSizes, SizeRule, read_sizes
from compress.arch.spec import BlockSpec, DecoderSpec, LinearSpec
from compress.errors import CheckpointError

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings")
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
ROUTERS = ("gate", "router", "wg", "shared_expert_gate")
# Linears of one parent module whose names tell that they read one input.
SHARED: Mapping[str, str] = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
}
# transformers 5 stacks the experts of nearly all mixtures; blocks run on per-expert views of these
# names, from what is on disk.
EXPERT_VIEWS: Mapping[str, str] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.(\w+)$")
# Constants that old checkpoints hold and today's classes compute.
BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)$"
)
# Matrices that are looked up, not multiplied.
LOOKED_UP = re.compile(r"embed|relative|position|rotary")
_STACK = re.compile(r"^(?:(.*?)\.)?(\d+)\.")


def describe_generic(
    text: Mapping[str, Any], tensors: Shapes, model_type: str, path: tuple[str, ...]
) -> DecoderSpec:
    """DecoderSpec of any decoder whose blocks are `<stack>.<index>.` and whose weights are 2-D.

    Raises CheckpointError when no stack of blocks is found, when a block is missing, or when too
    much of a block is not recognised.
    """
    sizes = read_sizes(text, SizeRule({}, required=(), listed=tuple(BLOCK_KEYS)))
    stack = _find_stack(tensors, sizes.layers, model_type)
    inside = group_blocks(tensors, stack)
    blocks = [
        _block(stack, index, inside.get(index, []), tensors, sizes.block(index))
        for index in range(sizes.layers or len(inside))
    ]
    outside = _outside(tensors, stack.rpartition(".")[0], sizes.vocab)
    return assemble(DecoderKind("generic", model_type, path), sizes, outside, blocks, tensors)


def _find_stack(tensors: Shapes, layers: int, model_type: str) -> str:
    """Path of the list of blocks, "model.layers".

    Of all `<stack>.<index>.` families the decoder's is the one that has as many members as the
    config says and a token embedding beside it; then the longest, then the largest.
    """
    members: dict[str, set[int]] = {}
    elements: dict[str, int] = {}
    for name, shape in tensors.items():
        match = _STACK.match(name)
        if match:
            stack = match[1] or ""
            members.setdefault(stack, set()).add(int(match[2]))
            elements[stack] = elements.get(stack, 0) + prod(shape)
    if not members:
        raise CheckpointError(
            f"no list of blocks ('<name>.0.<...>') among the tensors of this {model_type!r}"
            " checkpoint; only decoders made of numbered blocks are supported"
        )

    def rank(stack: str) -> tuple[bool, bool, int, int]:
        parent = stack.rpartition(".")[0]
        embedded = any(join(parent, name) + ".weight" in tensors for name in EMBEDDINGS)
        return (len(members[stack]) >= layers, embedded, len(members[stack]), elements[stack])

    return max(members, key=rank)


def _find_embedding(tensors: Shapes, root: str, vocab: int) -> str:
    for name in EMBEDDINGS:
        path = join(root, name) + ".weight"
        if path in tensors and len(tensors[path]) == 2:
            return path
    beside = [n for n in tensors if not _STACK.match(n) and n not in HEADS]
    rows = [n for n in beside if len(tensors[n]) == 2 and tensors[n][0] == vocab]
    if vocab and rows:
        return rows[0]
    raise CheckpointError(
        f"no token embedding beside the blocks ({join(root, EMBEDDINGS[0])}.weight or the like);"
        " is this checkpoint a text decoder, and complete?"
    )


def _outside(tensors: Shapes, root: str, vocab: int) -> Outside:
    """What lies beside the blocks and in no other numbered list: embeddings, final norm, head."""
    head = find_head(tensors, root, HEADS)
    # A tied head may have a bias of its own.
    heads = {
        head,
        find_head(tensors, root, [f"{name.removesuffix('weight')}bias" for name in HEADS]),
    }
    below = root + "." if root else ""
    beside = [
        name
        for name in tensors
        if name.startswith(below) and not _STACK.match(name) and not BUFFERS.search(name)
    ]
    names = [n for n in beside if n not in heads] + [n for n in tensors if n in heads]
    norms = [
        name
        for name in beside
        if len(tensors[name]) == 1 and name.endswith(".weight") and "embed" not in name
    ]
    embedding = _find_embedding(tensors, root, vocab)
    pairs = tuple((name, name) for name in names)
    return Outside(embedding, norms[-1] if norms else None, head, pairs)


def _block(
    stack: str, index: int, present: Sequence[str], tensors: Shapes, sizes: BlockSizes
) -> BlockSpec:
    prefix = join(stack, str(index))
    if not present:
        raise CheckpointError(f"tensors of block {prefix} are missing; is a shard missing?")
    names = [name for name in present if not BUFFERS.search(name)]
    transposed = _is_transposed(names, tensors)
    linears: list[LinearSpec] = []
    known: list[str] = []
    for name in names:
        local = name.removeprefix(prefix + ".")
        if _is_linear(local, tensors[name]):
            linears.append(_linear(name, local, tensors[name], transposed))
        if _is_linear(local, tensors[name]) or len(tensors[name]) == 1:
            known.append(name)
    unrecognised = tuple(name for name in names if name not in set(known))
    check_recognised(prefix, unrecognised, tensors, sum(prod(tensors[name]) for name in names))
    # Also what no method knows: a block runs with all of its tensors or not at all.
    modules = tuple((name, _parameter(name.removeprefix(prefix + "."))) for name in names)
    return BlockSpec(index, prefix, tuple(linears), modules, unrecognised, sizes=sizes)


def _is_linear(local: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and local.endswith(".weight") and not LOOKED_UP.search(local)


def _is_transposed(names: Sequence[str], tensors: Shapes) -> bool:
    """Whether the block's weights lie [in, out], as the lengths of their biases tell."""
    for name in names:
        shape = tensors[name]
        bias = tensors.get(name.removesuffix("weight") + "bias")
        if len(shape) == 2 and bias and len(bias) == 1 and shape[0] != bias[0] == shape[1]:
            return True
    return False


def _parameter(local: str) -> str:
    """Path of a parameter below the runnable block: as on disk, but for experts."""
    module, _, leaf = local.rpartition(".")
    match = _EXPERT.search(module)
    if match is None or match[2] not in EXPERT_VIEWS:
        return local
    return f"{module.removesuffix(match[2])}{EXPERT_VIEWS[match[2]]}.{leaf}"


def _linear(name: str, local: str, shape: tuple[int, ...], transposed: bool) -> LinearSpec:
    module = local.removesuffix(".weight")
    parent, _, leaf = module.rpartition(".")
    rows, columns = shape[::-1] if transposed else shape
    expert = _EXPERT.search(module)
    shared = SHARED.get("gate_proj" if expert and leaf in ("w1", "w3") else leaf)
    return LinearSpec(
        name=name.removesuffix(".weight"),
        tensor=name,
        shape=(rows, columns),
        role="router" if leaf in ROUTERS else "linear",
        shared_input=module if shared is None else join(parent, shared),
        module=_parameter(local).removesuffix(".weight"),
        transposed=transposed,
        fused=None if shared is None else join(parent, shared),
        expert=int(expert[1]) if expert else None,
    )
