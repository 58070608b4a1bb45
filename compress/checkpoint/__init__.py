"""Checkpoints on disk: a validating reader that streams, and a writer that can be resumed.

What handles tensors is loaded when first used, so that the structure of a checkpoint is known
without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from compress.checkpoint.gguf_file import model_folder
from compress.checkpoint.hub import resolve_model
from compress.checkpoint.output.folder import (
    Output,
    claimed,
    create_partial,
    free_bytes,
    prepare_output,
    publish,
    write_atomic,
)
from compress.checkpoint.output.lock import lent, locked, require_idle
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.header import TensorInfo
from compress.checkpoint.shards.layout import ShardFile, ShardLayout, plan_shards, single_file

if TYPE_CHECKING:
    from compress.checkpoint.scanning import scan
    from compress.checkpoint.shards.finite import NonFinite, find_nonfinite
    from compress.checkpoint.shards.writer import ShardWriter

_PLACES = {
    "NonFinite": "compress.checkpoint.shards.finite",
    "ShardWriter": "compress.checkpoint.shards.writer",
    "find_nonfinite": "compress.checkpoint.shards.finite",
    "scan": "compress.checkpoint.scanning",
}

__all__ = [
    "Checkpoint",
    "NonFinite",
    "Output",
    "ShardFile",
    "ShardLayout",
    "ShardWriter",
    "TensorInfo",
    "claimed",
    "create_partial",
    "find_nonfinite",
    "free_bytes",
    "lent",
    "locked",
    "model_folder",
    "plan_shards",
    "prepare_output",
    "publish",
    "require_idle",
    "resolve_model",
    "scan",
    "single_file",
    "write_atomic",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'compress.checkpoint' has no attribute {name!r}")
