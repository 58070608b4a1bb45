"""What a row of the architecture tables says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from compress.arch.sizes import SizeRule

NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One weight of a block, or of the model outside its blocks.

    role: a LinearSpec role, or "norm", "embedding", "head".
    disk: path of its module below the block on disk; `{e}` stands for each expert.
    dims: names of its logical sizes, (out, in) for a linear, resolved from the config.
    module: path below the runnable block, the same as `disk` when empty.
    shared_input, fused: see LinearSpec.
    transposed: a linear whose weight lies [in, out] on disk.
    bias: True when there always is one, a config key when that switches it on, None when it may
        be there or not.
    where: a size of the block, and whether a block with this row has it (True) or not (False).
    """

    role: str
    disk: str
    dims: tuple[str, ...]
    module: str = ""
    shared_input: str = ""
    fused: str | None = None
    transposed: bool = False
    bias: bool | str | None = None
    where: tuple[str, bool] | None = None

    @property
    def target(self) -> str:
        return self.module or self.disk


@dataclass(frozen=True, slots=True)
class FoldRow:
    """Channels that one row of a block writes and others read, with nothing between that a scale
    of each channel would not pass through (see FoldPair).

    writer: `disk` of the row that writes them. readers: roles of those that read them; of experts,
    those of the writer's own, or of all when the writer is no expert.
    channels: name of their number. skip: names of the writer's rows before the channels.
    by_head: the writer's rows lie head by head, in each head those of `skip` and then as many
    channels as a head of values has.
    only: a config key and the value that it must have, or be missing, for this to hold.
    A row whose writer a block does not have is not for that block.
    """

    writer: str
    readers: tuple[str, ...]
    channels: str
    skip: tuple[str, ...] = ()
    by_head: bool = False
    only: tuple[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Everything `describe` has to know about a model_type.

    attention, dense, sparse: rows of a block; a block has `attention` and one of the other two.
    folds: where channels can be scaled, in the order the block computes them.
    outside: embeddings and final norm, below the decoder's prefix.
    blocks: name of the list of blocks; root: the decoder's path in the causal-LM module.
    anchor: the row by which a decoder is found among other towers.
    head: names that the output head goes by on disk.
    buffers: tensors of old checkpoints that today's classes compute themselves.
    defaults: config values that transformers assumes when the key is absent.
    norm_offset: what a norm adds to its weight before it multiplies.
    listed: sizes (BLOCK_KEYS) that its config may give as a list, with a number for each block.
    value_width: whether its config may say how wide heads of values are (VALUE_KEY).
    assumes: config keys and the value that each must have, or be missing, for the table to hold;
        a text names another key whose value it must have. at_least: config keys that must be there,
        and other keys whose values theirs must reach. Any other checkpoint is described by its
        names alone.
    latent: whether attention keeps a latent, of sizes under LATENT_KEYS. plain: its config has
        sizes of experts that no block has.
    """

    attention: tuple[TensorRow, ...]
    dense: tuple[TensorRow, ...]
    outside: tuple[TensorRow, ...]
    anchor: str
    folds: tuple[FoldRow, ...]
    sparse: tuple[TensorRow, ...] = ()
    blocks: str = "layers"
    root: str = "model"
    head: tuple[str, ...] = ("lm_head.weight",)
    buffers: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)
    defaults: Mapping[str, int] = field(default_factory=lambda: NONE)
    norm_offset: float = 0.0
    listed: tuple[str, ...] = ()
    value_width: bool = False
    assumes: Mapping[str, Any] = field(default_factory=lambda: NONE)
    at_least: Mapping[str, str] = field(default_factory=lambda: NONE)
    latent: bool = False
    plain: bool = False

    @property
    def sizes(self) -> SizeRule:
        """How its config says sizes."""
        return SizeRule(
            self.defaults,
            listed=self.listed,
            value_width=self.value_width,
            latent=self.latent,
            plain=self.plain,
        )
