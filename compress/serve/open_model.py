"""A checkpoint opened to answer: `compress-model generate`, `chat`, and `compress.open_model`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from compress.checkpoint import Checkpoint, resolve_model
from compress.errors import RequestError
from compress.formats import Weights, open_weights
from compress.machine.device import settle
from compress.machine.environment import compute_dtype
from compress.runtime.loading.math import settled_math
from compress.runtime.loading.model import Model
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.runtime.sequences.limits import Limits
from compress.text.tokenizer import Tokenizer, load_tokenizer
from compress_kernels.panels import Math

KV_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
)


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The cache of an open model.

    tokens: positions that it holds, all texts together; by default whole contexts of as many texts
    as may run, within 30 % of the free memory. block_size: positions in a block. reuse: texts that
    begin alike share keys and values. kv_dtype: in which these are stored, int8 with a scale for
    each token and head; None: in the dtype of the model.
    """

    tokens: int | None = None
    block_size: int = 16
    reuse: bool = True
    kv_dtype: Literal["fp32", "bf16", "fp16", "int8"] | None = None


def open_model(
    checkpoint: str | Path,
    *,
    device: str = "auto",
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    math: Math | None = None,
    limits: Limits | None = None,
    cache: CacheOptions | None = None,
) -> Model:
    """A checkpoint, dense or compressed, that generates, streams and scores text.

    checkpoint: a folder, a GGUF file in one, or a hub id. device: as in RunOptions. math: what
    products with codes may round in fp32 on a CPU: "exact" nothing, "int16" (when left out) and
    "int8" inputs, to so many bits. limits: of a step of the engine. Raises a CompressError for what
    the user can mend.
    """
    cache = cache or CacheOptions()
    place = settle(device)
    arithmetic = compute_dtype("", place.name, dtype)
    weights = open_weights(Checkpoint.open(resolve_model(checkpoint)))
    tokenizer = load_tokenizer(weights.checkpoint.path)
    how = Opening(
        dtype=arithmetic,
        kv_dtype=stored_dtype(cache.kv_dtype),
        math=settled_math(weights, math, arithmetic, place.name),
        device=place.name,
        limits=limits or Limits(),
        block_size=cache.block_size,
        cache_tokens=cache.tokens,
        reuse=cache.reuse,
    )
    model = model_of(weights, tokenizer, how)
    return replace(model, notices=(*place.notices, *model.notices))


def stored_dtype(name: str | None) -> torch.dtype | None:
    """Of keys and values, by its name. RequestError for another name."""
    if name is not None and name not in KV_DTYPES:
        raise RequestError(f"kv_dtype is {name!r}; it is one of {', '.join(KV_DTYPES)}")
    return None if name is None else KV_DTYPES[name]


def model_of(weights: Weights, tokenizer: Tokenizer, how: Opening) -> Model:
    """The same of weights that are open already; the tokenizer's end of text ends a text too."""
    ends = how.eos if tokenizer.eos_id is None else (*how.eos, tokenizer.eos_id)

    def decode(ids: list[int]) -> str:
        # Ids of an engine are ints: Tokenizer.decode would make them so, in as long as it decodes.
        return tokenizer.decode_one(ids, True)

    engine, notices = open_engine(weights, replace(how, eos=ends), decode)
    return Model(engine, tokenizer, notices, how.math)
