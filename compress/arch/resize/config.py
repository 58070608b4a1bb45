"""config.json of a decoder with other sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from compress.arch.families.table import FAMILIES
from compress.arch.resize.between import behind, between
from compress.arch.resize.carriers import (
    CARRIERS,
    Landing,
    check_groups,
    landing_of,
    note_of,
    takes,
)
from compress.arch.resize.layers import reindexed
from compress.arch.resize.shape import Shape, kept_layers, sizes_after
from compress.arch.sizes import BLOCK_KEYS, KEYS, Sizes, read_sizes
from compress.arch.spec import DecoderSpec
from compress.arch.text_config import config_at, with_config_at
from compress.errors import CheckpointError

# Sizes in an order in which none follows from a later one, with the keys that may hold them.
WRITTEN = {
    name: {**KEYS, **BLOCK_KEYS}[name]
    for name in (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "key_width",
        "intermediate",
        "expert",
        "experts",
    )
}


@dataclass(frozen=True, slots=True)
class Resized:
    """config: config.json. notes: lines that a user should read, such as why the result is of
    another class."""

    config: dict[str, Any]
    notes: tuple[str, ...]


def resized(
    config: Mapping[str, Any], spec: DecoderSpec, shape: Shape, hidden: int | None = None
) -> Resized:
    """config.json of the decoder that a shape leaves of the one that `spec` describes.

    Every size goes under the key that the config has it under; one that so far followed from
    another is written out where it no longer does. All other keys stay as they are.

    hidden: what the next pass of the same stage narrows the residual stream to, where it does. The
    class must then take the sizes behind that one; in between only we read the model.

    Raises CheckpointError, in one line with the counts that would fit, for sizes that transformers'
    classes do not take, and for blocks that compute something else at another place.
    """
    text = behind(config_at(config, spec.text_config))
    sizes, kept = sizes_after(spec, shape), kept_layers(spec, shape)
    if shape != Shape():
        _refuse_unequal(text)
    if shape.pooled:
        check_groups(spec)
    inner, notes = dict(text), list[str]()
    if len(kept) < len(spec.blocks):
        inner, notes = reindexed(text, spec, kept)
    model_type = spec.model_type
    resizes = (shape.hidden, shape.heads, shape.kv_heads) != (None, None, None)
    last = replace(sizes, hidden=hidden or sizes.hidden)
    landing = landing_of(spec, text, last) if resizes else None
    if landing is not None:
        model_type = landing.model_type
        inner = landed(inner, landing, at_top=not spec.text_config)
        notes.append(note_of(spec, landing, last))
    inner = sized(inner, model_type, sizes)
    if last != sizes and landing is None and not takes(spec, text, sizes):
        inner = between(text, inner)
    return Resized(with_config_at(config, spec.text_config, inner), tuple(notes))


def _refuse_unequal(text: Mapping[str, Any]) -> None:
    if text.get("per_layer_config"):
        raise CheckpointError(
            "config.json has per_layer_config, so its blocks have sizes of their own; sizes can be"
            " changed of models whose blocks are alike"
        )


def landed(inner: Mapping[str, Any], landing: Landing, at_top: bool) -> dict[str, Any]:
    """The config of another class that computes the same."""
    kept = {key: value for key, value in inner.items() if key not in landing.drop}
    changed = {**landing.fill, **kept, **landing.add, "model_type": landing.model_type}
    if at_top or "architectures" in kept:
        changed["architectures"] = [landing.architecture]
    return changed


def sized(inner: Mapping[str, Any], model_type: str, sizes: Sizes) -> dict[str, Any]:
    """The config with all sizes as wanted: written where reading it says something else."""
    family, carrier = FAMILIES[model_type], CARRIERS[model_type]
    rule = family.sizes
    changed = dict(inner)
    for name, keys in WRITTEN.items():
        wanted = _size(sizes, name)
        if _size(read_sizes(changed, rule), name) == wanted:
            continue
        present = [key for key in keys if changed.get(key) is not None]
        absent = [carrier.words.get(name, keys[0])]
        changed |= dict.fromkeys(present or absent, wanted)
    for key, value in family.assumes.items():
        if isinstance(value, str) and changed.get(key) is not None:
            changed[key] = changed[value]  # opt: word_embed_proj_dim is hidden_size
    read = read_sizes(changed, rule)
    found = (read.hidden, read.layers, read.blocks)
    assert found == (sizes.hidden, sizes.layers, sizes.blocks), "the config says other sizes"
    return changed


def _size(sizes: Sizes, name: str) -> int:
    """A size by its name, of the first block where blocks have it."""
    owner = sizes if name in KEYS else sizes.blocks[0]
    return int(getattr(owner, name))
