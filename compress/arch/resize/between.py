"""config.json of a model between two passes of one stage: its heads are cut and its residual stream
is not narrow yet, sizes that a class may not take together.

Only this program reads such a model. Beside its sizes the config has what the class is built with,
the keys as they were before; the blocks then get their linears by the sizes (compress/blocks/
between.py).
"""

from collections.abc import Mapping
from typing import Any

from compress.arch.sizes import BLOCK_KEYS

KEY = "compress_built_with"
NAMES = ("heads", "kv_heads", "key_width")


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """A decoder's own config with the keys of heads as they were; null for one that was not there.

    before: a config that the class takes. after: with the sizes of the tensors.
    """
    keys = [key for name in NAMES for key in BLOCK_KEYS[name]]
    built = {key: before.get(key) for key in keys if before.get(key) != after.get(key)}
    return {**after, KEY: built}


def is_between(text: Mapping[str, Any]) -> bool:
    """Whether a decoder's own config is one of `between`."""
    return KEY in text


def built_with(text: Mapping[str, Any]) -> dict[str, Any]:
    """The config that the class is built with; of any other model its own."""
    built: Mapping[str, Any] = text.get(KEY, {})
    kept = {key: value for key, value in text.items() if key != KEY and key not in built}
    return kept | {key: value for key, value in built.items() if value is not None}


def behind(text: Mapping[str, Any]) -> dict[str, Any]:
    """The config for the next pass to write its sizes into: without keys that had to be said in
    between alone; of any other model its own."""
    built: Mapping[str, Any] = text.get(KEY, {})
    said = {key for key, value in built.items() if value is None}
    return {key: value for key, value in text.items() if key != KEY and key not in said}
