"""Whether the output head is the embedding: what config.json says, and what the tensors say.

Loaders go by `tie_word_embeddings`, and by the model's default where it is missing. A head that is
stored beside a config that says tied is kept by transformers 5 where its values differ from the
embedding's, and dropped by vLLM in any case; a head that is missing beside a config that says
untied is filled with random numbers. We go by the tensors: a stored head counts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.arch.spec import DecoderSpec
from compress.arch.text_config import text_config, with_config_at
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.header import TensorInfo
from compress.errors import CheckpointError

KEY = "tie_word_embeddings"
LM_HEAD = "lm_head.weight"
_ROWS = 1 << 14  # compared at once


def said(config: Mapping[str, Any]) -> bool | None:
    """What config.json says, the decoder's own config first; None where it says nothing."""
    for place in (text_config(config)[1], config):
        value = place.get(KEY)
        if value is not None:
            if not isinstance(value, bool):
                raise CheckpointError(f"config.json: {KEY} is {value!r}; it must be true or false")
            return value
    return None


def contradiction(config: Mapping[str, Any], spec: DecoderSpec) -> str | None:
    """What is odd about the two together, by names alone; None where nothing is."""
    tied = said(config)
    if spec.head is not None and tied:
        return (
            f"{KEY} is true, yet {spec.head.removesuffix('.weight')} is stored: transformers takes"
            " it where it differs from the embedding, vLLM does not; what we write says what it is"
        )
    if spec.head is None and tied is None and spec.family != "generic":
        return (
            f"config.json does not have {KEY}, and no output head is stored: it is taken to be the"
            " embedding, which loaders do where that is the model's default; what we write says so"
        )
    return None


def settled(checkpoint: Checkpoint, spec: DecoderSpec, apart: bool = False) -> Checkpoint:
    """The checkpoint with a config that says what the tensors are, where it said otherwise or
    nothing and loaders would differ. Reads embedding and head where both are stored and dense.

    apart: a stored head becomes another tensor than the embedding, whatever it is now.
    """
    tied = said(checkpoint.config)
    if spec.head is None:
        unsaid = tied is None and spec.family != "generic"
        return _with_tie(checkpoint, tied=True) if unsaid else checkpoint
    if tied is False or not (apart or _differ(checkpoint, spec.head, spec.embedding)):
        return checkpoint
    return _with_tie(checkpoint, tied=False)


def tied_config(config: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json that says so in both places where loaders look."""
    path, text = text_config(config)
    return {**with_config_at(config, path, {**text, KEY: tied}), KEY: tied}


def head_name(spec: DecoderSpec) -> str:
    """What transformers calls the head of a tied model: beside the module "model" that has the
    embedding in it."""
    parts = spec.embedding.split(".")
    outer = parts[: len(parts) - 1 - parts[::-1].index("model")] if "model" in parts else []
    return ".".join([*outer, LM_HEAD])


def shares_bytes(tensors: Mapping[str, TensorInfo], spec: DecoderSpec) -> bool:
    """Whether head and embedding are one tensor in the files: what a run unties by config alone."""
    if spec.head is None:
        return False
    head, embedding = tensors[spec.head], tensors[spec.embedding]
    return (head.file, head.start) == (embedding.file, embedding.start)


def _with_tie(checkpoint: Checkpoint, *, tied: bool) -> Checkpoint:
    return replace(checkpoint, config=tied_config(checkpoint.config, tied=tied))


def _differ(checkpoint: Checkpoint, a: str, b: str) -> bool:
    """Whether two tensors are not both stored as they are and equal bit for bit."""
    import torch

    x, y = checkpoint.tensors.get(a), checkpoint.tensors.get(b)
    if x is None or y is None or (x.dtype, x.shape) != (y.dtype, y.shape):
        return True
    if (x.file, x.start) == (y.file, y.start):
        return False
    for start in range(0, x.shape[0], _ROWS):
        stop = min(start + _ROWS, x.shape[0])
        rows = [checkpoint.read_rows(name, start, stop) for name in (a, b)]
        if not torch.equal(*(part.reshape(-1).view(torch.uint8) for part in rows)):
            return True
    return False
