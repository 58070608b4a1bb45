"""An engine for a checkpoint: which decoder computes, how large its cache is, what ends a text."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

import torch

from compress.arch.forward.forward import ForwardSpec, describe_forward
from compress.arch.text_config import config_at
from compress.blocks.landed import check_latents
from compress.errors import CheckpointError, RequestError
from compress.runtime.decoder.build import Loader
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache, cache_bytes
from compress.runtime.decoder.linear import (
    multiplied,
    refusals,
)
from compress.runtime.decoder.one_call import in_one_call
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.interfaces import StepRunner
from compress.runtime.engine.refusals import ModelFacts, one_variant
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.forms.form import Arithmetic
from compress.runtime.loading.math import math_notices
from compress.runtime.loading.room import free_bytes, kept_bytes, with_room
from compress.runtime.loading.selfcheck import check_bits
from compress.runtime.sequences.limits import Limits, check_limits, check_whole
from compress.runtime.sequences.stops import Decode
from compress_kernels.panels import Math

if TYPE_CHECKING:
    from compress.formats.weights import Weights

# Of the memory that is free before a model is read, for keys and values.
CACHE_SHARE = 0.3
# Positions where a config does not say how many the model reads.
UNKNOWN_CONTEXT = 4096
# Texts whose keys and values transformers keeps where it takes the decoder's place.
KEPT_TEXTS = 8


@dataclass(frozen=True, slots=True)
class Opening:
    """How an engine is opened.

    eos: ids that end a text beside those that the checkpoint names. cache_tokens: positions that
    the cache holds for all texts together; by default those of as many whole contexts as may run,
    within CACHE_SHARE of the free memory. reuse: texts that begin alike share keys and values.
    kv_dtype: in which these are stored, int8 with a scale for each token and head; None: in dtype.
    math: of products with codes (compress.runtime.loading.math settles what was asked).
    """

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    limits: Limits = field(default_factory=Limits)
    block_size: int = 16
    cache_tokens: int | None = None
    reuse: bool = True
    eos: tuple[int, ...] = ()
    kv_dtype: torch.dtype | None = None
    math: Math = "exact"

    @property
    def arithmetic(self) -> Arithmetic:
        """Where memory is plenty."""
        return Arithmetic.here(self.dtype, self.device, self.math)

    @property
    def stored(self) -> torch.dtype:
        """Of keys and values."""
        return self.kv_dtype or self.dtype


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    runner: StepRunner
    variant: Callable[[int], int]
    notices: tuple[str, ...]


def open_engine(
    weights: "Weights", how: Opening | None = None, decode: Decode | None = None
) -> tuple[Engine, tuple[str, ...]]:
    """The engine, and what one should know of it, in lines.

    decode: ids -> text, special tokens left out. Errors: RequestError where the memory does not
    do, and for values out of range; CheckpointError for what neither our decoder nor transformers
    reads.
    """
    how = how or Opening()
    _check_opening(how)
    check_latents(weights, how.dtype)
    free = free_bytes(how.device)
    context = weights.spec.context or UNKNOWN_CONTEXT
    try:
        forward = describe_forward(weights.checkpoint.config, weights.spec)
    except CheckpointError as error:
        _check_memory(weights, _all_bytes, how.arithmetic, free)
        parts = _in_transformers(weights, how, context, str(error))
    else:
        parts = _native(weights, how, context, forward, free)
    facts = ModelFacts(
        context=context,
        vocabulary=weights.spec.vocab,
        eos=tuple(sorted({*how.eos, *_named_ends(weights)})),
        fingerprint=str(weights.checkpoint.path),
        variant=parts.variant,
    )
    engine = Engine(parts.runner, facts, how.limits, decode=decode, reuse=how.reuse)
    return engine, (*parts.notices, *engine.notices)


def _check_opening(how: Opening) -> None:
    """Before anything is read."""
    check_limits(how.limits)
    check_whole("block_size", how.block_size, 1)
    if how.cache_tokens is not None:
        check_whole("cache_tokens", how.cache_tokens, 1)


def _native(
    weights: "Weights", how: Opening, context: int, forward: ForwardSpec, free: int | None
) -> _Parts:
    each = [cache_bytes([layer.cache()], how.stored) for layer in forward.layers]
    tokens = how.cache_tokens or context * how.limits.running
    if how.cache_tokens is None and free is not None:
        tokens = min(tokens, int(CACHE_SHARE * free) // max(1, sum(each)))
    blocks = [_blocks(window, tokens, how) for window in forward.windows]
    needed = how.block_size * sum(blocks[forward.group(i)] * size for i, size in enumerate(each))
    asked = 0 if how.cache_tokens is None else needed
    arithmetic = with_room(weights, how.arithmetic, None if free is None else free - asked)
    _check_memory(weights, kept_bytes, arithmetic, free)
    if free is not None and asked > free:
        raise RequestError(
            f"keys and values of {tokens} tokens take {needed / 2**30:.1f} GiB of memory,"
            f" {free / 2**30:.1f} GiB are free; take fewer cache_tokens"
        )
    decoder = Decoder.of(Loader(weights, forward, arithmetic))
    cache = KVCache(
        forward,
        blocks,
        how.block_size,
        dtype=how.stored,
        device=decoder.device,
    )
    checked = check_bits(decoder, how.limits.tokens_per_step, how.stored)
    notices = [checked.notice] if checked.notice is not None else []
    notices += refusals(weights, arithmetic)
    notices += math_notices(weights, arithmetic)
    if weights.kv_cache is not None:
        # Codes of 8 bits with such scales are nothing that attention reads.
        notices.append(
            "keys and values are rounded to 8 bits by the checkpoint's scales, and take the memory"
            f" of {how.stored}"
        )
    if tokens < context:
        notices.append(f"the cache has room for {tokens} tokens; the model reads {context}")
    runner = LocalRunner(checked.decoder, cache)
    if checked.decoder is decoder:
        called = in_one_call(decoder, cache, how.limits.tokens_per_step)
        if called.reason is not None:
            notices.append(f"steps run op by op, not in one call: {called.reason}")
        if called.decoder is not None:
            runner = LocalRunner(called.decoder, cache, called.decoder.best)
    return _Parts(runner, forward.variant, tuple(notices))


def _blocks(window: int | None, tokens: int, how: Opening) -> int:
    """Of a group of layers, the null block included. Behind a window nothing is kept."""
    count = -(-tokens // how.block_size)
    if window is not None:
        seen = window - 1 + how.limits.chunk(how.block_size)
        count = min(count, how.limits.running * (-(-seen // how.block_size) + 1))
    return 1 + max(1, count)


def _in_transformers(weights: "Weights", how: Opening, context: int, reason: str) -> _Parts:
    # Late: it imports transformers.
    from compress.runtime.loading.fallback import TokenCache, TransformersDecoder

    reason = reason.split(";")[0]
    try:
        decoder = TransformersDecoder(weights, dtype=how.dtype, device=how.device, texts=KEPT_TEXTS)
    except CheckpointError as error:
        why = str(error).split(";")[0]
        raise CheckpointError(
            f"{weights.checkpoint.path} cannot be run: {reason}, and transformers does not do it"
            f" either ({why}); a newer transformers may"
        ) from error
    tokens = how.cache_tokens or context * how.limits.running
    cache = TokenCache(1 + -(-tokens // how.block_size), how.block_size)
    notice = (
        f"transformers computes here, one text at a time: {reason}. That is slow, and"
        " the last bits can depend on how a text was cut"
    )
    kept = f"keys and values are transformers' own, in {how.dtype}, whatever was asked"
    asked = how.kv_dtype or weights.kv_cache
    plain = f"products are transformers' own, and exact; math {how.math} was asked"
    more = (*((kept,) if asked else ()), *((plain,) if how.math != "exact" else ()))
    return _Parts(LocalRunner(decoder, cache), one_variant, (notice, *more))


def _named_ends(weights: "Weights") -> set[int]:
    """Ids that end a text, as generation_config.json says, or else config.json."""
    config = weights.checkpoint.config
    settings = weights.checkpoint.small.find_object("generation_config.json")
    text = config_at(config, weights.spec.text_config)
    for source in (settings, config, text):
        found = source.get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            return {i for i in ids if isinstance(i, int) and 0 <= i < weights.spec.vocab}
    return set()


def _all_bytes(weights: "Weights", how: Arithmetic) -> int:
    """Everything in one dtype; the embedding as above."""
    count = sum(prod(spec.shape) for spec in multiplied(weights))
    return (count + 2 * prod(weights.spec.embedding_shape)) * how.dtype.itemsize


def _check_memory(
    weights: "Weights",
    needs: Callable[["Weights", Arithmetic], int],
    how: Arithmetic,
    free: int | None,
) -> None:
    needed = needs(weights, how)
    if free is not None and needed > free:
        half = replace(how, dtype=torch.bfloat16)
        smaller = "; take dtype bf16" if needs(weights, half) < needed else ""
        raise RequestError(
            f"{weights.checkpoint.path} needs {needed / 2**30:.1f} GiB of memory as {how.dtype},"
            f" {free / 2**30:.1f} GiB are free{smaller}"
        )
