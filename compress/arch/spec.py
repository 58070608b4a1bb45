"""DecoderSpec: what kind of decoder a checkpoint holds, free of any architecture's names."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from compress.arch.sizes import NO_SIZES, BlockSizes


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear layer of a decoder block: where its weight lies and what it shares.

    name: module path in the checkpoint, "model.layers.0.self_attn.q_proj".
    tensor: its weight's name in the checkpoint, usually name + ".weight".
    shape: logical (N, K) = (out, in), whatever the order on disk.
    transposed: stored [K, N] on disk (GPT-2's Conv1D).
    role: "q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down", "router", "head",
        "embedding" (rows that are looked up, not multiplied), or "linear" for a decoder that is in
        no table. Of latent attention "kv_a" makes the latent and the rotated key, "kv_b" keys and
        values of the latent; "q_a" and "q_b" make queries where these have a latent of their own.
    shared_input: linears of a block with the same key read the same activations.
    module: path below the runnable block, "self_attn.q_proj"; for an expert the path of its
        per-expert view, "mlp.experts.3.gate".
    fused: linears of a block with the same key are one matrix in serving runtimes (q/k/v; gate/up)
        and must be quantized alike; None when the runtime keeps the linear by itself.
    expert: index of the expert, None outside a mixture.
    """

    name: str
    tensor: str
    shape: tuple[int, int]
    role: str
    shared_input: str
    module: str
    transposed: bool = False
    fused: str | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class FoldPair:
    """Channels that one module writes and linears read (AWQ's and SmoothQuant's smooth and balance
    layers): dividing them where they are written and multiplying the readers' columns by the same
    changes nothing.

    writer: module path in the checkpoint of a norm ("norm") or of a linear ("linear").
    tensors: the writer's tensors in the checkpoint, weight first, then its bias where there is one.
    rows: (start, stop) of the writer's rows (a norm: its elements) that are the channels, or that
        the channels begin and end with: see `run`.
    readers: names of all linears that read the channels, a router included.
    shared_input: the key under which they read.
    repeat, head_dim: the readers' columns are [heads, repeat, head_dim] over channels
        [heads, head_dim] (grouped-query attention: v read by o); repeat is 1 otherwise.
    run, gap: where the channels do not lie together: `run` rows of them, `gap` rows of something
        else, and so on (gpt_neox keeps q, k and v of a head together); run is 0 otherwise.
    offset: what a norm adds to its weight before it multiplies (gemma: 1); a scale divides the sum.
    """

    writer: str
    kind: Literal["norm", "linear"]
    tensors: tuple[str, ...]
    rows: tuple[int, int]
    readers: tuple[str, ...]
    shared_input: str
    repeat: int = 1
    head_dim: int = 0
    run: int = 0
    gap: int = 0
    offset: float = 0.0

    def channels(self) -> slice | list[int]:
        """The writer's rows that are the channels, in order: an index of its tensors."""
        start, stop = self.rows
        if not self.run:
            return slice(start, stop)
        period = self.run + self.gap
        return [row for row in range(start, stop) if (row - start) % period < self.run]


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One decoder block.

    prefix: its path in the checkpoint, "model.layers.0".
    modules: (checkpoint tensor, parameter path below the runnable block) for every tensor that
        the runnable block needs, linears included.
    unrecognised: tensors below the prefix that no row of the family's table names; they are
        copied and listed.
    folds: pairs of modules between which channels can be scaled; none for a decoder in no table.
    sizes: as config.json has them for this block; zeros where nothing is known of them.
    axes: of every checkpoint tensor of `modules` the names of its dimensions as it lies on disk
        ("hidden", "q", "mlp"; see BlockSizes.of); empty for a decoder in no table.
    """

    index: int
    prefix: str
    linears: tuple[LinearSpec, ...]
    modules: tuple[tuple[str, str], ...]
    unrecognised: tuple[str, ...] = ()
    folds: tuple[FoldPair, ...] = ()
    sizes: BlockSizes = NO_SIZES
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Architecture-neutral description of a text decoder inside a checkpoint.

    family: a row of the tables, or "generic".
    text_config: path of the decoder's own config inside config.json, () at the top.
    embedding, final_norm, head: tensor names; head is None when tied to the embedding.
    embedding_shape, head_shape: of these tensors; rows may be padded beyond `vocab`. None without
        a head.
    outside: (checkpoint tensor, parameter path in the transformers causal-LM module) of what a
        forward needs beside the blocks: embeddings, final norm, head.
    copied: tensors that belong to no part of the decoder (vision towers, multi-token
        prediction, anything unknown); they are carried over untouched and listed.
    unnamed: for a decoder in no table the linear modules of transformers' class, by path, that go
        by the name of no tensor (a tied head); None where the class was not opened.
    """

    family: str
    model_type: str
    text_config: tuple[str, ...]
    hidden: int
    vocab: int
    context: int
    experts_per_token: int
    tied: bool
    embedding: str
    embedding_shape: tuple[int, int]
    final_norm: str | None
    head: str | None
    head_shape: tuple[int, int] | None
    outside: tuple[tuple[str, str], ...]
    blocks: tuple[BlockSpec, ...]
    copied: tuple[str, ...]
    unnamed: tuple[str, ...] | None = None

    @property
    def heads(self) -> int:
        """Of the block that has most, as all sizes here; 0 where the config does not say."""
        return max((block.sizes.heads for block in self.blocks), default=0)

    @property
    def kv_heads(self) -> int:
        return max((block.sizes.kv_heads for block in self.blocks), default=0)

    @property
    def head_dim(self) -> int:
        """Numbers of a head of queries and keys."""
        return max((block.sizes.key_width for block in self.blocks), default=0)

    @property
    def intermediate(self) -> int:
        return max((block.sizes.intermediate for block in self.blocks), default=0)

    @property
    def experts(self) -> int:
        return max((block.sizes.experts for block in self.blocks), default=0)

    @property
    def head_widths(self) -> tuple[int, ...]:
        """All numbers of a head that there are, of keys and of values, without repeats."""
        sizes = [block.sizes for block in self.blocks if block.sizes.heads]
        return tuple(dict.fromkeys(w for x in sizes for w in (x.key_width, x.value_width)))

    def sizes_of(self, linear: LinearSpec) -> BlockSizes:
        """Of the block that a linear lies in."""
        return next(x.sizes for x in self.blocks if linear.name.startswith(f"{x.prefix}."))

    def linears(self) -> Iterator[LinearSpec]:
        """All linears of all blocks, in order (head and embedding are not among them)."""
        for block in self.blocks:
            yield from block.linears

    def head_linear(self) -> LinearSpec | None:
        """The output head (role "head"), which lies in no block; None when it is tied."""
        if self.head is None or self.head_shape is None:
            return None
        name = self.head.removesuffix(".weight")
        return LinearSpec(name, self.head, self.head_shape, "head", "head", name)

    def embedding_linear(self) -> LinearSpec:
        """The token embedding (role "embedding"): a linear of one-hot inputs, in no block."""
        name = self.embedding.removesuffix(".weight")
        shape = self.embedding_shape
        return LinearSpec(name, self.embedding, shape, "embedding", "embedding", name)

    def kv_bytes_per_token(self, width: int, quantized: Collection[int] = ()) -> int:
        """What a cache takes for keys and values of one token, in all blocks together.

        width: bytes of a number. quantized: numbers of the blocks that store theirs in one byte, by
        fixed scales, which take nothing a token.
        """
        return self.kv_bytes([1] * len(self.blocks), width, quantized)

    def kv_bytes(self, kept: Iterable[int], width: int, quantized: Collection[int] = ()) -> int:
        """As `kv_bytes_per_token`, where each block keeps so many tokens."""
        return sum(
            count * block.sizes.cache().nbytes(1 if block.index in quantized else width)
            for count, block in zip(kept, self.blocks, strict=True)
        )

    def all_linears(self) -> tuple[LinearSpec, ...]:
        """Everything that can be quantized: the linears of the blocks, the head, the embedding."""
        head = self.head_linear()
        return (*self.linears(), *(() if head is None else (head,)), self.embedding_linear())

    def all_numbers(self) -> int:
        """Of `all_linears`: what a decoder has in memory, vectors and tables of positions aside."""
        return sum(prod(x.shape) for x in self.all_linears())
