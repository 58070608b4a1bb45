"""How long quantizing will take and how much memory it will need, before it starts.

Time is counted work over rates that are measured here and now, in a fraction of a second, as if
nothing else were running. Memory is what is alive at the worst moment. Both leave evaluation out;
the report later sets them beside what was measured.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.checkpoint import Checkpoint
from compress.pipeline.sizes import ROWS_AT_ONCE, rows_at_once
from compress.quant.rounding import clip_ratios
from compress.quant.scheme import QuantScheme
from compress_calibration.config import CalibrationConfig
from compress_kernels import gram_, group_scale

MB = 1_000_000
# Resident after the imports, measured with torch 2.13 and transformers 5.23 on Linux x86-64.
TORCH_BYTES, TRANSFORMERS_BYTES = 265 * MB, 200 * MB
# Building the skeleton, seconds of one core; the imports fall into the checks before the work.
SKELETON_SECONDS = 0.3
# What a forward keeps alive: hidden-sized tensors (residual, norms in fp32, q, k, v, rotated
# copies) and feed-forward ones (gate, its activation, up, their product) a token.
LIVE_HIDDEN, LIVE_WIDE = 12, 4
# One decoding step of one block beside its arithmetic: dispatch of its two dozen small operations.
DISPATCH_SECONDS = 1.2e-3


@dataclass(frozen=True, slots=True)
class Estimate:
    """seconds of the quantizing stage; peak_rss_bytes of the process in it."""

    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine does a second: operations of matrix products in the compute dtype and in
    fp32, Gram operations, weights through the scale search, bytes through element-wise passes."""

    product: float
    product_fp32: float
    gram: float
    search: float
    elementwise: float


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done. `linears`: those to quantize; `dtype`: of the calibrated passes; `head`:
    the output head, where it is solved by what it reads."""

    checkpoint: Checkpoint
    spec: DecoderSpec
    linears: Sequence[tuple[LinearSpec, QuantScheme]]
    calibration: CalibrationConfig | None
    dtype: torch.dtype
    head: LinearSpec | None = None


def estimate(job: Job) -> Estimate:
    """Time and memory of the quantizing stage on this machine."""
    rates = measure_rates(job.dtype)
    if job.calibration is None:
        return Estimate(_stream_seconds(job, rates), _stream_bytes(job))
    return Estimate(_calibrated_seconds(job, rates), _calibrated_bytes(job))


def measure_rates(dtype: torch.dtype) -> Rates:
    """Quick probes, 20 ms each; their buffers are small beside any model."""
    x, w = torch.randn(1024, 512, dtype=dtype), torch.randn(512, 1024, dtype=dtype)
    a, b = torch.randn(1024, 512), torch.randn(512, 1024)
    rows, out = torch.randn(2048, 128), torch.zeros(512, 512)
    ratios = clip_ratios("mse", QuantScheme())
    product = 2 * 1024 * 512 * 1024
    return Rates(
        product=product / least_seconds(lambda: x @ w),
        product_fp32=product / least_seconds(lambda: a @ b),
        gram=1024 * 512 * 512 / least_seconds(lambda: gram_(x, out)),
        search=rows.numel()
        / least_seconds(lambda: group_scale(rows, ratios, None, 4, True, torch.bfloat16)),
        elementwise=2 * x.nbytes / least_seconds(lambda: silu(x)),
    )


def least_seconds(work: Callable[[], object], budget: float = 0.02) -> float:
    """Shortest time of a call over about `budget` seconds, after one to warm up.

    The shortest, for other processes only ever add to it: by medians one plan came to 15 s and to
    40 s, by what else ran in that fraction of a second.
    """
    work()
    times: list[float] = []
    while sum(times) < budget or len(times) < 5:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _stream_seconds(job: Job, rates: Rates) -> float:
    weights = sum(prod(linear.shape) for linear, _ in job.linears)
    # Beside the search: widen, divide, round, clamp, narrow, dequantize, subtract, three sums.
    passes = 24 * 4 * weights / rates.elementwise
    files = 3 * job.checkpoint.nbytes / rates.elementwise
    return 0.2 + weights / rates.search + passes + files


def _stream_bytes(job: Job) -> int:
    largest = max(_worked_at_once(linear, scheme) for linear, scheme in job.linears)
    stored = torch.empty((), dtype=job.dtype).element_size()
    # fp32 rows, their quotient, the dequantized values and the difference; source and codes whole.
    return TORCH_BYTES + largest * 4 * 4 + _held_whole(job) * (stored + 2)


def _worked_at_once(linear: LinearSpec, scheme: QuantScheme) -> int:
    """Weights in a run of rows; all of them where one number of the scheme is for all."""
    weights = prod(linear.shape)
    whole = scheme.is_fp4 or scheme.granularity == "tensor"
    return weights if whole else min(weights, ROWS_AT_ONCE)


def _held_whole(job: Job) -> int:
    """Weights of the largest linear, or of all that are merged and share a number."""
    together: dict[tuple[str, str, int | None], int] = {}
    for linear, scheme in job.linears:
        shared = linear.fused if scheme.spans_merged else None
        key = (_block_of(linear), shared, linear.expert) if shared else (linear.name, "", None)
        together[key] = together.get(key, 0) + prod(linear.shape)
    return max(together.values())


def _calibrated_seconds(job: Job, rates: Rates) -> float:
    assert job.calibration is not None
    tokens = job.calibration.samples * job.calibration.length
    blocks = len(job.spec.blocks)
    inside = [x for x, _ in job.linears if x.role not in ("head", "embedding")]
    weights = sum(prod(linear.shape) for linear in inside)
    forwards = 2 * tokens * weights * (2 - 1 / blocks)
    inputs = {(_block_of(linear), linear.shared_input): linear.shape[1] for linear in inside}
    gram = tokens * sum(k * k for k in inputs.values())
    factor = sum(k**3 for k in inputs.values()) * 2 / 3
    loops = sum(2 * n * k * k for n, k in (x.shape for x in inside)) * 5
    wide = LIVE_WIDE * job.spec.intermediate + LIVE_HIDDEN * job.spec.hidden
    passing = 2 * tokens * blocks * wide * job.dtype.itemsize * 2 / rates.elementwise
    searched = sum(prod(x.shape) for x, _ in job.linears)
    return (
        SKELETON_SECONDS
        + _head_seconds(job, tokens, rates)
        + _sampling_seconds(job, rates)
        + forwards / rates.product
        + 2 * blocks * _attention_seconds(job, tokens)
        + passing
        + gram / rates.gram
        + (factor + loops) / rates.product_fp32
        + 2 * searched / rates.search
    )


def _head_seconds(job: Job, tokens: int, rates: Rates) -> float:
    """Observing and solving the head, factored anew for every run of its rows."""
    if job.head is None:
        return 0.0
    n, k = job.head.shape
    runs = -(-n * k // ROWS_AT_ONCE)
    solving = runs * k**3 * 2 / 3 + 10 * n * k * k
    return tokens * k * k / rates.gram + solving / rates.product_fp32


def _attention_seconds(job: Job, tokens: int) -> float:
    """Attention of one block over all tokens, from one row of that length."""
    assert job.calibration is not None
    spec, length = job.spec, min(job.calibration.length, 2048)
    q = torch.randn(1, spec.heads, length, spec.head_dim, dtype=job.dtype)
    row = least_seconds(lambda: scaled_dot_product_attention(q, q, q, is_causal=True))
    return row * tokens / length


def _sampling_seconds(job: Job, rates: Rates) -> float:
    """Text of the model's own, where the recipe calibrates on it."""
    share = _own_share(job)
    if share == 0:
        return 0.0
    assert job.calibration is not None
    spec, length = job.spec, job.calibration.length
    count = round(job.calibration.samples * share)
    rows = _sample_rows(job, count)
    weights = sum(prod(x.shape) for x in spec.linears()) + spec.vocab * spec.hidden
    products = 2 * rows * weights / rates.product
    cached = rows * len(spec.blocks) * _decoding_seconds(job)
    # The softmax over the vocabulary in fp64.
    drawn = 6 * 8 * rows * spec.vocab / rates.elementwise
    step = products + cached + drawn + DISPATCH_SECONDS * len(spec.blocks)
    return length * -(-count // rows) * step


def _decoding_seconds(job: Job) -> float:
    """One new token's attention in one block to half the length, which is the average.

    Probed, not counted: on two cores it went through keys and values at a quarter of the speed of
    element-wise passes, and was half of the time that tale-6m took to write 128 x 256 tokens.
    """
    assert job.calibration is not None
    spec, rows, length = job.spec, 16, max(1, min(job.calibration.length, 2048) // 2)
    q = torch.randn(rows, spec.heads, 1, spec.head_dim, dtype=job.dtype)
    k = torch.randn(rows, spec.heads, length, spec.head_dim, dtype=job.dtype)
    return least_seconds(lambda: scaled_dot_product_attention(q, k, k)) / rows


def _sample_rows(job: Job, count: int) -> int:
    """Sequences that are sampled at once."""
    # Late: a data-free run loads nothing that runs blocks.
    from compress.blocks.sample import rows_at_once as sample_rows

    assert job.calibration is not None
    return min(count, sample_rows(job.spec, job.dtype, job.calibration.length))


def _own_share(job: Job) -> float:
    """Share of the calibration tokens that the model writes itself."""
    assert job.calibration is not None
    sources = job.calibration.sources
    return sum(s.weight for s in sources if s.kind == "self") / sum(s.weight for s in sources)


def _cache_bytes(job: Job) -> int:
    """Keys and values of one token over all blocks."""
    spec = job.spec
    return 2 * len(spec.blocks) * spec.kv_heads * spec.head_dim * job.dtype.itemsize


def _calibrated_bytes(job: Job) -> int:
    """The worst of a batch in a block and of the largest solve, on top of what is always there."""
    assert job.calibration is not None
    config, spec = job.calibration, job.spec
    shape = (config.samples, config.length, spec.hidden)
    batch = rows_at_once(shape, job.dtype, config.spill_bytes) * config.length
    width = job.dtype.itemsize
    live = batch * width * (LIVE_WIDE * spec.intermediate + LIVE_HIDDEN * spec.hidden)
    of_block = [x for x, _ in job.linears if _block_of(x) == _block_of(job.linears[0][0])]
    weights = sum(prod(x.shape) for x in of_block) * width
    inputs = {x.shared_input: x.shape[1] for x in of_block}
    hessians = sum(4 * k * k for k in inputs.values())
    solves = [
        4 * k * k * 3 + 7 * 4 * sum(prod(x.shape) for x in of_block if x.shared_input == key)
        for key, k in inputs.items()
    ]
    always = TORCH_BYTES + TRANSFORMERS_BYTES
    worst = max(weights + hessians + max(live, *solves), _outside_bytes(job), _sampling_bytes(job))
    return always + worst


def _outside_bytes(job: Job) -> int:
    """Of a head or an embedding: codes and source whole, some runs of rows in fp32."""
    sizes = [prod(x.shape) for x, _ in job.linears if x.role in ("head", "embedding")]
    if not sizes:
        return 0
    solving = 0 if job.head is None else 3 * 4 * job.head.shape[1] ** 2
    return max(sizes) * (job.dtype.itemsize + 2) + min(max(sizes), ROWS_AT_ONCE) * 4 * 7 + solving


def _sampling_bytes(job: Job) -> int:
    """The whole model, its cache and the logits of a step, where it writes its own text."""
    if _own_share(job) == 0:
        return 0
    assert job.calibration is not None
    spec, length = job.spec, job.calibration.length
    rows = _sample_rows(job, job.calibration.samples)
    weights = sum(prod(x.shape) for x in spec.linears()) + spec.vocab * spec.hidden
    cache = rows * length * _cache_bytes(job)
    return weights * job.dtype.itemsize + cache + 3 * 8 * rows * spec.vocab


def _block_of(linear: LinearSpec) -> str:
    """A key that is equal for linears of one block: the name up to its number."""
    head, _, _ = linear.name.partition(f".{linear.module.partition('.')[0]}.")
    return head
