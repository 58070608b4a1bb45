"""Checkpoints on disk: a validating reader that streams, and a writer that can be resumed."""

from compress.checkpoint.atomic import (
    Output,
    create_partial,
    free_bytes,
    locked,
    prepare_output,
    publish,
    write_atomic,
)
from compress.checkpoint.finite import NonFinite, find_nonfinite
from compress.checkpoint.header import TensorInfo
from compress.checkpoint.hub import resolve_model
from compress.checkpoint.layout import ShardFile, ShardLayout, plan_shards, single_file
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.scanning import scan
from compress.checkpoint.writer import ShardWriter

__all__ = [
    "Checkpoint",
    "NonFinite",
    "Output",
    "ShardFile",
    "ShardLayout",
    "ShardWriter",
    "TensorInfo",
    "create_partial",
    "find_nonfinite",
    "free_bytes",
    "locked",
    "plan_shards",
    "prepare_output",
    "publish",
    "resolve_model",
    "scan",
    "single_file",
    "write_atomic",
]
