"""Which weights the original stores as [K, N] (GPT-2's Conv1D), though their codes are [N, K]."""

from collections.abc import Callable, Mapping
from typing import Any

from compress.arch.families.table import FAMILIES
from compress.arch.text_config import text_config
from compress.checkpoint.detect import find_block
from compress.errors import CheckpointError


def by_config_or_family(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether the original stores a module's weight as [K, N]: as our config says, or else by the
    family's table, which other tools' checkpoints of a Conv1D need."""
    named = names_in(config, "transposed")
    family = FAMILIES.get(str(text_config(config)[1].get("model_type")))
    rows = () if family is None else (*family.attention, *family.dense, *family.sparse)
    endings = tuple(f".{row.disk}" for row in rows if row.transposed)
    return lambda module: module in named or module.endswith(endings)


def by_config(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """The same where other tools keep a Conv1D in its own order: only our config tells."""
    return names_in(config, "transposed").__contains__


def names_in(config: Mapping[str, Any], key: str) -> frozenset[str]:
    """Module names that a key of the quantization config lists; none without it.

    CheckpointError for anything but a list of texts.
    """
    place, block = find_block(config) or ("quantization_config", {})
    named = [] if block.get(key) is None else block[key]
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise CheckpointError(f"config.json: {place}.{key} must be a list of module names")
    return frozenset(named)
