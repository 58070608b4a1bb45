"""How long quantizing will take and how much memory a run will need, before it starts.

Time is counted work over rates that are measured here and now, in a fraction of a second of
processor time, as if nothing else were running. It is that of the passes, with the text that the
model writes for them and the proof of a GGUF file that is the result; evaluation, exports, and
the measurement of schemes to choose from are left out. Memory is that of every part of the run. The
report later sets both beside what was measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from compress.arch.spec import DecoderSpec
from compress.blocks.live import live_bytes
from compress.edits.work import EditSize
from compress.machine.memory import resident_bytes
from compress.plan import probes
from compress.plan.memory_needs import (
    LESSONS,
    PROOF,
    QUANTIZING,
    WRITING,
    MemoryNeed,
    RunSize,
    block_of,
    memory_needs,
    own_share,
    sample_rows,
)
from compress.plan.probes import MachineRates, MetLoad
from compress.plan.row_counts import ROWS_AT_ONCE
from compress.plan.whole.size import blocks_seconds, proof_seconds
from compress.report.disturbance import DISTURBING
from compress_calibration.config import CalibrationConfig

# Building the skeleton, seconds of one core; the imports fall into the checks before the work.
SKELETON_SECONDS = 0.3
# One decoding step of one block beside its arithmetic: dispatch of its two dozen small operations.
DISPATCH_SECONDS = 1.2e-3
# Heads whose attention is probed: others take as long.
PROBED_HEADS = 4
# Tokens of a row whose attention is probed, at most.
PROBED_LENGTH = 2048
# Passes over what a block keeps alive of a token, while it goes through.
PASSES_OF_LIVE = 4
# Bytes that a softmax over logits, a divergence and its gradient read and write of each.
LOGIT_BYTES = 48
# Times the estimate that a run takes: 0.8 to 1.5 by processor time in the runs of docs/report.md.
LEAST_OF, MOST_OF = 0.6, 1.7
# An edit reads, looks for NaN, converts, looks for what is lost, writes, and hashes the result.
EDIT_PASSES = 12
# Files made, renamed and opened again.
EDIT_SECONDS = 0.1
# Beside other work a call on several threads waits for the one that is held up most: two threads on
# two cores took 1.6 to 2.0 times as long as each of them alone beside the same work.
WAITING = 2.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """seconds of all passes on this machine with nothing else to do. needs: memory of
    every part of the run. load: what else the machine did; None where it does not say. times:
    seconds of each part that takes some; parts of one name are there more than once."""

    seconds: float
    needs: tuple[MemoryNeed, ...]
    load: MetLoad | None = None
    times: tuple[tuple[str, float], ...] = ()

    @property
    def peak_rss_bytes(self) -> int:
        """Of the process, over all parts of the run."""
        return max(need.bytes for need in self.needs)

    @property
    def quiet_range(self) -> tuple[float, float]:
        """Seconds between which the stage is expected with nothing else to do."""
        return LEAST_OF * self.seconds, MOST_OF * self.seconds

    @property
    def loaded_range(self) -> tuple[float, float] | None:
        """The same beside what else the machine does; None where that is too little to matter."""
        if self.load is None or self.load.others < DISTURBING * self.load.cores:
            return None
        low, high = self.quiet_range
        return low * self.load.slowdown, WAITING * high * self.load.slowdown

    def _parts(self) -> dict[str, int]:
        """Memory by part; of two edits of one name, which are two parts, the larger."""
        parts: dict[str, int] = {}
        for need in self.needs:
            parts[need.part] = max(need.bytes, parts.get(need.part, 0))
        return parts

    def _seconds(self) -> dict[str, float]:
        """By part; of two of one name the sum."""
        parts: dict[str, float] = {}
        for part, seconds in self.times:
            parts[part] = parts.get(part, 0.0) + seconds
        return parts

    def to_json(self) -> dict[str, Any]:
        """Plain data; "loaded" is null on a quiet machine."""
        (low, high), loaded, load = self.quiet_range, self.loaded_range, self.load
        return {
            "seconds": self.seconds,
            "seconds_low": low,
            "seconds_high": high,
            "loaded": None
            if loaded is None or load is None
            else {
                "seconds_low": loaded[0],
                "seconds_high": loaded[1],
                "busy_cores": load.others,
                "cores": load.cores,
            },
            "peak_rss_bytes": self.peak_rss_bytes,
            "parts": self._parts(),
            "seconds_of_parts": self._seconds(),
        }


def estimate(run_size: RunSize) -> Estimate:
    """Time of the passes and memory of the run on this machine."""
    rates = probes.measure_rates(run_size.dtype)
    times = tuple(_times(run_size, rates))
    seconds = sum(each for _, each in times)
    return Estimate(seconds, memory_needs(run_size, resident_bytes()), rates.load, times)


def _times(run_size: RunSize, rates: MachineRates) -> Iterator[tuple[str, float]]:
    """Of every part that takes some, in the order of the run."""
    calibrating = run_size.calibration is not None
    drawn = run_size.drawn or run_size.calibration
    if drawn is not None and own_share(drawn) > 0:
        yield WRITING, _sampling_seconds(run_size, drawn, rates)
    for edit in run_size.edits:
        if edit.written is not None and own_share(edit.written) > 0:
            yield LESSONS, _sampling_seconds(run_size, edit.written, rates)
        yield edit.name, _edit_seconds(edit, run_size.dtype, rates)
    if calibrating:
        yield QUANTIZING, _calibrated_seconds(run_size, rates)
    elif run_size.linears:
        yield QUANTIZING, _stream_seconds(run_size, rates)
    if run_size.file is not None and run_size.file.rounded:  # exports are no part of the passes
        yield PROOF, SKELETON_SECONDS + proof_seconds(run_size.file, rates)


def _edit_seconds(edit: EditSize, dtype: torch.dtype, rates: MachineRates) -> float:
    """Of the pass of an edit; of one that looks at data, what it computes. Solves in fp64 go at
    half the speed of fp32."""
    seconds = EDIT_SECONDS + EDIT_PASSES * edit.model.nbytes / rates.elementwise
    work = edit.work
    if work is None:
        return seconds
    counted = (
        work.products / rates.product
        + work.grams / rates.gram
        + (work.wide + 2 * work.solves) / rates.product_fp32
        + (work.moved + LOGIT_BYTES * work.logits) / rates.elementwise
    )
    passing = work.passages * _passage_seconds(edit.model.spec, edit.length, dtype, rates)
    return seconds + SKELETON_SECONDS + counted + passing


def _passage_seconds(
    spec: DecoderSpec, length: int, dtype: torch.dtype, rates: MachineRates
) -> float:
    """What a token of a row of that length takes in a block beside its products."""
    seen = max(1, min(length, PROBED_LENGTH))
    row = attention_seconds((1, spec.heads, seen, spec.head_dim), seen, dtype)
    return row / seen + PASSES_OF_LIVE * live_bytes(spec, 1, dtype.itemsize) / rates.elementwise


def attention_seconds(shape: tuple[int, int, int, int], keys: int, dtype: torch.dtype) -> float:
    """Attention of queries [batch, heads, length, head_dim] to so many keys, all seen by all but
    those of a whole text (keys = length), which see what is before them. 0 without heads."""
    batch, heads, length, width = shape
    if not heads:
        return 0.0
    probed = min(heads, PROBED_HEADS)

    def make() -> probes.Call:
        q = torch.ones(batch, probed, length, width, dtype=dtype)
        k = torch.ones(batch, probed, keys, width, dtype=dtype)
        causal = keys == length > 1
        return lambda: scaled_dot_product_attention(q, k, k, is_causal=causal)

    return probes.probe(make).seconds * heads / probed


def _stream_seconds(run_size: RunSize, rates: MachineRates) -> float:
    weights = sum(prod(linear.shape) for linear, _ in run_size.linears)
    # Beside the search: widen, divide, round, clamp, narrow, dequantize, subtract, three sums.
    passes = 24 * 4 * weights / rates.elementwise
    files = 3 * run_size.model.nbytes / rates.elementwise
    return 0.2 + weights / rates.search + passes + files


def _calibrated_seconds(run_size: RunSize, rates: MachineRates) -> float:
    assert run_size.calibration is not None
    config = run_size.calibration
    tokens = config.samples * config.length
    blocks = len(run_size.spec.blocks)
    inside = [x for x, _ in run_size.linears if x.role not in ("head", "embedding")]
    weights = sum(prod(linear.shape) for linear in inside)
    forwards = 2 * tokens * weights * (2 - 1 / blocks)
    inputs = {(block_of(linear), linear.shared_input): linear.shape[1] for linear in inside}
    gram = tokens * sum(k * k for k in inputs.values())
    factor = sum(k**3 for k in inputs.values()) * 2 / 3
    loops = sum(2 * n * k * k for n, k in (x.shape for x in inside)) * 5
    passage = _passage_seconds(run_size.spec, config.length, run_size.dtype, rates)
    return (
        SKELETON_SECONDS
        + _head_seconds(run_size, tokens, rates)
        + forwards / rates.product
        + 2 * blocks * tokens * passage
        + gram / rates.gram
        + (factor + loops) / rates.product_fp32
        + _search_seconds(run_size, rates)
    )


def _search_seconds(run_size: RunSize, rates: MachineRates) -> float:
    """Of scales: for what rounding alone gives, and for compensated codes."""
    if run_size.file is not None and run_size.file.rounded:
        return 2 * blocks_seconds(run_size.file)
    return 2 * sum(prod(x.shape) for x, _ in run_size.linears) / rates.search


def _head_seconds(run_size: RunSize, tokens: int, rates: MachineRates) -> float:
    """Observing and solving the head, factored anew for every run of its rows."""
    if run_size.head is None:
        return 0.0
    n, k = run_size.head.shape
    runs = -(-n * k // ROWS_AT_ONCE)
    solving = runs * k**3 * 2 / 3 + 10 * n * k * k
    return tokens * k * k / rates.gram + solving / rates.product_fp32


def _sampling_seconds(run_size: RunSize, config: CalibrationConfig, rates: MachineRates) -> float:
    """Text of the given model's own: it is there once, whatever reads it."""
    spec, length, share = run_size.given_spec, config.length, own_share(config)
    count = round(config.samples * share)
    rows = sample_rows(spec, run_size.dtype, count, length)
    weights = sum(prod(x.shape) for x in spec.linears()) + spec.vocab * spec.hidden
    products = 2 * rows * weights / rates.product
    cached = rows * len(spec.blocks) * _decoding_seconds(spec, length, run_size.dtype)
    # The softmax over the vocabulary in fp64.
    drawn = 6 * 8 * rows * spec.vocab / rates.elementwise
    step = products + cached + drawn + DISPATCH_SECONDS * len(spec.blocks)
    return length * -(-count // rows) * step


def _decoding_seconds(spec: DecoderSpec, length: int, dtype: torch.dtype) -> float:
    """One new token's attention in one block to half the length, which is the average.

    Probed, not counted: on two cores it went through keys and values at a quarter of the speed of
    element-wise passes, and was half of the time that tale-6m took to write 128 x 256 tokens.
    """
    rows, keys = 16, max(2, min(length, PROBED_LENGTH) // 2)
    return attention_seconds((rows, spec.heads, 1, spec.head_dim), keys, dtype) / rows
