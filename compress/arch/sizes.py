"""Sizes of a decoder, read from config.json under the names that families use for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.errors import CheckpointError

# One size, the config keys that may hold it; the first key that is there and not null counts.
KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "expert": ("moe_intermediate_size",),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
}
MAX_LAYERS = 100_000  # blocks are counted out before their tensors are looked for


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes a decoder's shapes follow from; 0 where the config has no such thing.

    dense_layers: blocks that have a plain MLP though the model is a mixture.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    expert: int
    layers: int
    vocab: int
    context: int
    experts: int
    experts_per_token: int
    dense_layers: frozenset[int]

    def of(self, name: str) -> int:
        """Size of a row's dimension by its name in the tables."""
        derived = {
            "q": self.heads * self.head_dim,
            "kv": self.kv_heads * self.head_dim,
            "qkv": (self.heads + 2 * self.kv_heads) * self.head_dim,
            "mlp": self.intermediate,
            "mlp2": 2 * self.intermediate,
            "context2": self.context + 2,
        }
        return derived[name] if name in derived else int(getattr(self, name))


def read_sizes(
    config: Mapping[str, Any],
    defaults: Mapping[str, int],
    *,
    required: tuple[str, ...] = ("hidden", "heads", "layers", "vocab"),
) -> Sizes:
    """Sizes from a text config.

    defaults: values by config key that hold when the key is absent. Raises CheckpointError when
    a required size is missing or a size is no positive integer.
    """
    found = {name: _size(config, name, keys, defaults) for name, keys in KEYS.items()}
    for name in required:
        if not found[name]:
            raise CheckpointError(
                f"config.json: no {KEYS[name][0]}; it is needed to know the shapes of a"
                f" {config.get('model_type')!r} decoder"
            )
    if found["layers"] > MAX_LAYERS:
        raise CheckpointError(
            f"config.json: {KEYS['layers'][0]} is {found['layers']}; decoders of up to {MAX_LAYERS}"
            " blocks can be read"
        )
    chosen = found["experts_per_token"]
    if found["experts"] and "num_experts_per_tok" in config and not 0 < chosen <= found["experts"]:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {config['num_experts_per_tok']!r}; it must be 1"
            f" to {found['experts']}, the number of experts"
        )
    heads = found["heads"]
    found["kv_heads"] = found["kv_heads"] or heads
    found["head_dim"] = found["head_dim"] or (found["hidden"] // heads if heads else 0)
    # GPT-2's n_inner is usually null and then means 4 * hidden.
    found["intermediate"] = found["intermediate"] or 4 * found["hidden"]
    found["expert"] = found["expert"] or found["intermediate"]
    return Sizes(**found, dense_layers=_dense_layers(config, found["layers"], found["experts"]))


def _size(
    config: Mapping[str, Any], name: str, keys: tuple[str, ...], defaults: Mapping[str, int]
) -> int:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not _is_whole(value) or value < 0:
            raise CheckpointError(f"config.json: {key} is {value!r}; it must be a whole number")
        return int(value)
    return next((defaults[key] for key in keys if key in defaults), 0)


def _dense_layers(config: Mapping[str, Any], layers: int, experts: int) -> frozenset[int]:
    if not experts:
        return frozenset(range(layers))
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
    return frozenset({index for index in range(layers) if (index + 1) % step} | set(plain))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
