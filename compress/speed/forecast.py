"""What a checkpoint is expected to do on this machine, as numbers for people and for JSON."""

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from compress.runtime.loading.open_engine import CACHE_SHARE
from compress.runtime.sequences.limits import Limits
from compress.speed.left import Left, left
from compress.speed.load import Speed, even_load, predict, speed_of
from compress.speed.rates import Calibrated
from compress.speed.roofline import (
    Cost,
    best_batch,
    ceiling,
    compute_bound_batch,
    expected,
    first_token,
    first_token_ceiling,
    intensity,
    texts_that_fit,
)
from compress.speed.workload import decode_load

BLOCK = 16


@dataclass(frozen=True, slots=True)
class LoadShape:
    """batches: texts at once. prompt, output: tokens of each."""

    batches: tuple[int, ...]
    prompt: int
    output: int

    @property
    def whole(self) -> int:
        """Of a text at its end."""
        return self.prompt + self.output

    @property
    def length(self) -> int:
        """Of a text in the middle of its output."""
        return self.prompt + max(1, self.output // 2)


def forecast(found: Calibrated, asked: LoadShape, context: int) -> dict[str, Any]:
    """Memory in bytes, times in milliseconds, with what the machine allows at best beside them.

    context: tokens of a text, at most.
    """
    work, machine, rates, limits = found.work, found.machine, found.rates, Limits()
    tokens = cache_tokens(found, context, limits)
    texts = texts_that_fit(work, tokens * work.kv_bytes_per_token, asked.length, BLOCK)
    bound = compute_bound_batch(work, machine)
    most = limits.tokens_per_step
    return {
        "stored_bytes": _stored(found),
        "weight_bytes": work.weight_bytes,
        "kv_bytes_per_token": work.kv_bytes_per_token,
        "kv_bytes_of_text": {str(n): work.kv_bytes(n) for n in (asked.whole, context)},
        "cache_tokens": tokens,
        "cache_texts": texts,
        "compute_bound_batch": round(bound, 2) if isfinite(bound) else None,
        "best_batch": best_batch(work, rates, asked.length, max(1, min(texts, limits.sequences))),
        "first_token": {
            "prompt": asked.prompt,
            "expected_ms": _ms(first_token(work, rates, asked.prompt, most)),
            "at_best_ms": _ms(first_token_ceiling(work, machine, asked.prompt, most)),
        },
        "steps": [_step(found, batch, asked.length) for batch in asked.batches],
    }


def cache_tokens(found: Calibrated, context: int, limits: Limits) -> int:
    """Positions that the engine's cache holds when it is opened as usual."""
    tokens, free = context * limits.running, found.machine.free_bytes
    if free is None:
        return tokens
    return min(tokens, int(CACHE_SHARE * free) // found.work.kv_bytes_per_token)


def predicted_speed(found: Calibrated, asked: LoadShape, batch: int) -> Speed:
    """Of `batch` texts that are all there at the start."""
    jobs = even_load(batch, asked.prompt, asked.output)
    return speed_of(predict(found.work, found.rates, jobs, reuse=False))


def _step(found: Calibrated, batch: int, length: int) -> dict[str, Any]:
    """A step in which each of `batch` texts gets a token."""
    load = decode_load(found.work, batch, length)
    cost = expected(found.work, found.rates, load)
    best = ceiling(found.work, found.machine, load)
    return {
        "batch": batch,
        "length": length,
        "expected_ms": _ms(cost.total),
        "at_best_ms": _ms(best),
        "tokens_per_second": _digits(batch / cost.total),
        "at_best_tokens_per_second": _digits(batch / best),
        "operations_per_byte": _digits(intensity(found.work, load)),
        "memory_bytes": found.work.weight_bytes + batch * found.work.kv_bytes(length),
        "parts_ms": _each_ms(cost),
        "left_ms": _each_ms(left(found.work, found.machine, load, cost)),
    }


def _stored(found: Calibrated) -> dict[str, int]:
    """How the weights are stored -> their bytes."""
    sizes: dict[str, int] = {}
    for product in found.work.products:
        more = product.count * product.nbytes
        sizes[product.stored] = sizes.get(product.stored, 0) + more
    return sizes


def _each_ms(parts: Cost | Left) -> dict[str, float]:
    return {name: _ms(seconds) for name, seconds in asdict(parts).items()}


def _ms(seconds: float) -> float:
    return _digits(1000 * seconds)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
