"""Sizes of a decoder, read from config.json under the names that families use for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.arch.layer_cache import LayerCache, keys_and_values, latent_cache
from compress.errors import CheckpointError

# One size, the config keys that may hold it; the first key that is there and not null counts.
KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx"),
    "experts_per_token": ("num_experts_per_tok",),
}
# The same of sizes that each block has for itself.
BLOCK_KEYS: Mapping[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "key_width": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "expert": ("moe_intermediate_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
# That of values stands in a config of its own kind only; elsewhere they are as wide as keys.
VALUE_KEY = "v_head_dim"
# Sizes of latent attention, in a config of its own kind only; there heads have no head_dim.
LATENT_KEYS: Mapping[str, tuple[str, ...]] = {
    "rank": ("kv_lora_rank",),
    "rotated": ("qk_rope_head_dim",),
    "nope": ("qk_nope_head_dim",),
    "query_rank": ("q_lora_rank",),
}
MAX_LAYERS = 100_000  # blocks are counted out before their tensors are looked for


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of latent attention (MLA, arXiv 2405.04434).

    rank: numbers of the latent that keys and values of all heads are made of. rotated: of each
    head of queries and of the one key that all heads share, the last numbers, which positions
    rotate. query_rank: of the latent that queries are made of; 0 where they have none.
    """

    rank: int
    rotated: int
    query_rank: int = 0


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes that the shapes of one block follow from; 0 where the config has no such thing.

    key_width, value_width: numbers of a head of queries and keys, and of values.
    expert: the inner width of one. dense: a plain MLP though the model is a mixture.
    latent: of attention whose keys and values are made of a latent; None for any other.
    """

    heads: int = 0
    kv_heads: int = 0
    key_width: int = 0
    value_width: int = 0
    intermediate: int = 0
    expert: int = 0
    experts: int = 0
    dense: bool = True
    latent: LatentSizes | None = None

    @property
    def rotated(self) -> int:
        """Numbers of a head of queries and keys that a rotation is for."""
        return self.key_width if self.latent is None else self.latent.rotated

    def cache(self) -> LayerCache:
        """What a token leaves: keys and values of heads, or one latent for all."""
        if self.latent is not None:
            return latent_cache(self.latent.rank, self.latent.rotated)
        return keys_and_values(self.kv_heads, self.key_width, self.value_width)

    def of(self, name: str) -> int:
        """Size of a row's dimension by its name in the tables."""
        keys, values = self.kv_heads * self.key_width, self.kv_heads * self.value_width
        derived = {
            "q": self.heads * self.key_width,
            "k": keys,
            "v": values,
            "qkv": self.heads * self.key_width + keys + values,
            "attended": self.heads * self.value_width,
            "mlp": self.intermediate,
            "mlp2": 2 * self.intermediate,
        }
        if self.latent is not None:
            nope = self.key_width - self.latent.rotated
            derived |= {
                "rank": self.latent.rank,
                "query_rank": self.latent.query_rank,
                "nope": nope,
                "latent": self.latent.rank + self.latent.rotated,
                "unfolded": self.heads * (nope + self.value_width),
            }
        return derived[name] if name in derived else int(getattr(self, name))


NO_SIZES = BlockSizes()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes a decoder's shapes follow from; 0 where the config has no such thing.

    blocks: of each block; those of the first where the config does not say how many there are.
    """

    hidden: int
    layers: int
    vocab: int
    context: int
    experts_per_token: int
    blocks: tuple[BlockSizes, ...]

    def block(self, index: int) -> BlockSizes:
        return self.blocks[index] if self.layers else self.blocks[0]

    def of(self, name: str, block: BlockSizes | None = None) -> int:
        """Size of a row's dimension by its name in the tables, of a block where it has its own."""
        if name == "context2":
            return self.context + 2
        if name in KEYS:
            return int(getattr(self, name))
        assert block is not None, "what lies outside of the blocks has sizes of the model"
        return block.of(name)


@dataclass(frozen=True, slots=True)
class SizeRule:
    """What a family's config may leave out, and what it may say more.

    defaults: values by config key that hold when the key is absent. required: sizes that must be
    there. listed: sizes of blocks that may be lists, with a number for each block. value_width:
    whether values may have a width of their own. latent: whether attention has the sizes of
    LATENT_KEYS. plain: no block has experts, whatever the config says of them.
    """

    defaults: Mapping[str, int]
    required: tuple[str, ...] = ("hidden", "heads", "layers", "vocab")
    listed: tuple[str, ...] = ()
    value_width: bool = False
    latent: bool = False
    plain: bool = False


def read_sizes(config: Mapping[str, Any], rule: SizeRule) -> Sizes:
    """Sizes from a text config.

    Raises CheckpointError when a required size is missing, when a size is no positive integer, and
    for a list that is not of one number a block.
    """
    found = {name: _size(config, keys, rule) for name, keys in KEYS.items()}
    found |= {"experts_per_token": 0} if rule.plain else {}
    if found["layers"] > MAX_LAYERS:
        raise CheckpointError(
            f"config.json: {KEYS['layers'][0]} is {found['layers']}; decoders of up to {MAX_LAYERS}"
            " blocks can be read"
        )
    blocks = _blocks(config, found["hidden"], found["layers"], rule)
    for name in rule.required:
        if not (found[name] if name in found else all(getattr(x, name) for x in blocks)):
            raise CheckpointError(
                f"config.json: no {(KEYS.get(name) or BLOCK_KEYS[name])[0]}; it is needed to know"
                f" the shapes of a {config.get('model_type')!r} decoder"
            )
    _check_chosen(config, found["experts_per_token"], blocks)
    return Sizes(**found, blocks=blocks)


def _blocks(
    config: Mapping[str, Any], hidden: int, layers: int, rule: SizeRule
) -> tuple[BlockSizes, ...]:
    """The sizes of each block; those of one where their number is not known."""
    keys = _block_keys(config, rule)
    listed = {name: _of_blocks(config, name, keys[name], layers, rule) for name in keys}
    dense = _dense_layers(config, layers, any(listed["experts"]))
    return tuple(
        _block_sizes({name: each[index] for name, each in listed.items()}, hidden, index in dense)
        for index in range(max(layers, 1))
    )


def _block_keys(config: Mapping[str, Any], rule: SizeRule) -> dict[str, tuple[str, ...]]:
    """One size of a block, the config keys that may hold it; none for what it does not have."""
    keys = {**BLOCK_KEYS, "value_width": (VALUE_KEY,) if rule.value_width else ()}
    if rule.plain:
        keys |= {"expert": (), "experts": ()}
    if rule.latent:
        keys |= {**LATENT_KEYS, "key_width": ()}
        if config.get("q_lora_rank", 0) is None:  # null says more than an absent key
            keys["query_rank"] = ()
    return keys


def _latent_sizes(found: Mapping[str, int]) -> LatentSizes | None:
    if "rank" not in found:
        return None
    if not found["rank"]:
        raise CheckpointError("config.json: kv_lora_rank is 0; a latent has 1 number or more")
    if not found["rotated"] or found["rotated"] % 2:
        raise CheckpointError(
            f"config.json: qk_rope_head_dim is {found['rotated']}; numbers are rotated in twos, so"
            " it must be 2, 4, ..."
        )
    return LatentSizes(found["rank"], found["rotated"], found["query_rank"])


def _block_sizes(found: Mapping[str, int], hidden: int, dense: bool) -> BlockSizes:
    """What is not said follows from what is."""
    heads, latent = found["heads"], _latent_sizes(found)
    key_width = found["key_width"] or (hidden // heads if heads else 0)
    if latent is not None:
        key_width = found["nope"] + latent.rotated
    # GPT-2's n_inner is usually null and then means 4 * hidden.
    intermediate = found["intermediate"] or 4 * hidden
    return BlockSizes(
        heads=heads,
        kv_heads=found["kv_heads"] or heads,
        key_width=key_width,
        value_width=found["value_width"] or key_width,
        intermediate=intermediate,
        expert=found["expert"] or intermediate,
        experts=found["experts"],
        dense=dense,
        latent=latent,
    )


def _check_chosen(config: Mapping[str, Any], chosen: int, blocks: Sequence[BlockSizes]) -> None:
    experts = min((x.experts for x in blocks if x.experts), default=0)
    if experts and "num_experts_per_tok" in config and not 0 < chosen <= experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {config['num_experts_per_tok']!r}; it must be 1"
            f" to {experts}, the number of experts"
        )


def _of_blocks(
    config: Mapping[str, Any], name: str, keys: tuple[str, ...], layers: int, rule: SizeRule
) -> list[int]:
    """A size of each block; one where their number is not known."""
    key = next((key for key in keys if config.get(key) is not None), "")
    value = config.get(key)
    if not isinstance(value, list) or name not in rule.listed:
        return [_size(config, keys, rule)] * max(layers, 1)
    if len(value) != layers:
        raise CheckpointError(
            f"config.json: {key} has {len(value)} entries; it must have {layers}, one for each"
            " layer, or be one number"
        )
    return [_whole(f"{key}[{index}]", each) for index, each in enumerate(value)]


def _size(config: Mapping[str, Any], keys: tuple[str, ...], rule: SizeRule) -> int:
    for key in keys:
        if config.get(key) is not None:
            return _whole(key, config[key])
    return next((rule.defaults[key] for key in keys if key in rule.defaults), 0)


def _whole(place: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"config.json: {place} is {value!r}; it must be a whole number")
    return value


def _dense_layers(config: Mapping[str, Any], layers: int, mixture: bool) -> frozenset[int]:
    count = max(layers, 1)
    if not mixture:
        return frozenset(range(count))
    step = 1 if config.get("decoder_sparse_step") is None else config["decoder_sparse_step"]
    if not _is_whole(step) or step < 1:
        raise CheckpointError(
            f"config.json: decoder_sparse_step is {step!r}; it must be a whole number, 1 or more"
        )
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(_is_whole(index) for index in plain):
        raise CheckpointError(
            f"config.json: mlp_only_layers is {plain!r}; it must be a list of block numbers"
        )
    return frozenset({index for index in range(count) if (index + 1) % step} | set(plain))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
