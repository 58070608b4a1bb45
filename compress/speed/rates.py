"""What the engine's operations take on this machine, each measured by itself, in seconds.

No step of a model is timed here, so that a prediction is one: products run on weights that lie in
caches as far as the model's do, attention on keys and values of its own, what stands between
products in a decoder whose products compute nothing, and the planning of steps around that decoder.
Where the engine's steps are one call, products and what stands between them are ops of such calls.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec, describe_forward
from compress.arch.forward.kinds import Grouped, Latent
from compress.arch.spec import LinearSpec
from compress.formats import Weights
from compress.runtime.decoder.calls import why_no_call
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.linear import Linear, facts_of
from compress.runtime.decoder.one_call import MOST, runs_calls
from compress.runtime.forms.form import Arithmetic, LinearWeight
from compress.runtime.forms.packed import DECODED
from compress.runtime.forms.table import pack_blocks, pack_codes, pack_dense
from compress.speed.called import CalledProducts, CalledSteps
from compress.speed.hollow import Hollow, MemoryReader
from compress.speed.products import DENSE, workload_of
from compress.speed.roofline import Curve, EngineRates, Hardware, LookRates, bytes_read, line
from compress.speed.timer import TIMES, Timer, measure_machine
from compress.speed.workload import AttentionWork, Product, Workload, decode_load
from compress_kernels.ops.attention import paged_attention
from compress_kernels.ops.linear import row_multiple
from compress_kernels.paged import TokenPlaces

# Rows of products that are measured, as far as the engine has them; of what stands between them, in
# steps that are one call and in larger ones; sequences of the planning.
PRODUCT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BETWEEN_ROWS = (1, 16, MOST)
LARGE_ROWS = (MOST + 1, 2 * MOST)
SEQUENCES = (1, 32)
# Weights of one product: of a larger one so many rows are measured, as the rest takes as long. Of
# packed ones two of the tiles in which they are decoded.
MOST_WEIGHTS, MOST_PACKED = 1 << 23, 2 * DECODED
# Weights that are gone through in turn, or as many as the model has: more than caches hold.
COLD_BYTES = 128 << 20
# Seconds between two looks at the clock, or those of one call.
BURST = 0.01
# Of the attention that is measured: positions of a text, bytes of all texts where a token is the
# only one of its text: as many as caches hold, and as none does.
POSITIONS, STATE_BYTES, BLOCK = 256, (4 << 20, 16 << 20, 64 << 20), 16
# Tokens of a text where nothing else is asked.
LENGTH = 128
# Rows that stay whole when a weight is cut: as many as may share a scale.
_WHOLE_ROWS = 128


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A checkpoint and this machine, as far as predictions need them."""

    work: Workload
    machine: Hardware
    rates: EngineRates


def calibrate(
    weights: Weights,
    *,
    how: Arithmetic | None = None,
    kv_dtype: torch.dtype | None = None,
    timer: Timer | None = None,
    machine: Hardware | None = None,
    length: int = LENGTH,
) -> Calibrated:
    """Takes seconds; the weights are not loaded.

    how: of the engine, fp32 on the CPU where left out, with as many threads as torch has now.
    kv_dtype: of keys and values, its own where left out. machine: measured already. length: of a
    text, as its keys and values take room in caches. Errors: CheckpointError for a decoder that is
    in no table of forwards.
    """
    how = how or Arithmetic.here(torch.float32, "cpu")
    place, dtype = how.device, how.dtype
    timer = timer or Timer(place)
    work = workload_of(weights, dtype=dtype, kv_dtype=kv_dtype, device=place, math=how.math)
    machine = machine or measure_machine(dtype, timer)
    rates = measure_rates(weights, work, how, kv_dtype or dtype, timer, length)
    if place.type == "cuda":
        torch.cuda.empty_cache()  # an engine that opens next looks at what is free
    return Calibrated(work, machine, rates)


def measure_rates(
    weights: Weights,
    work: Workload,
    arithmetic: Arithmetic,
    kv_dtype: torch.dtype,
    timer: Timer,
    length: int = LENGTH,
) -> EngineRates:
    """work: as `workload_of` gave it for the same weights, dtypes and math.

    Reads norms and one linear of each kind of quantized weights.
    """
    device, dtype = timer.device, arithmetic.dtype
    how = describe_forward(weights.checkpoint.config, weights.spec)
    curves, tiled = [], False
    multiple = row_multiple(dtype, device)

    def total(texts: int) -> int:
        """Bytes that a step reads."""
        return int(bytes_read(work, decode_load(work, texts, length)))

    read = MemoryReader.of(timer, total(max(PRODUCT_ROWS)))
    called = None
    if are_calls(weights, work, arithmetic):
        called = CalledSteps.of(weights, how, arithmetic, read, total)
    with torch.inference_mode():
        for product in work.products:
            linears = list(_copies(weights, product, arithmetic, total(max(PRODUCT_ROWS))))
            choose = product.part == "head"
            if called is None or (choose and not called.chooses(linears[0])):
                curve, same = _product(linears, product, multiple, timer, dtype)
                tiled |= not same
            else:
                curve = _called_product(linears, product, total, timer, dtype)
            curves.append(curve)
        looks = tuple(_looks(how, part, (dtype, kv_dtype), timer) for part in work.attention)
    between, host = _around(weights, how, arithmetic, called, read)
    return EngineRates(tuple(curves), looks, between, host, multiple, tiled)


def are_calls(weights: Weights, work: Workload, arithmetic: Arithmetic) -> bool:
    """Whether the products of all layers may be part of a call."""
    if not runs_calls(arithmetic.dtype, arithmetic.device):
        return False
    body = (product for product in work.products if product.part != "head")
    each = (next(_copies(weights, product, arithmetic, 0)) for product in body)
    return all(why_no_call(linear) is None for linear in each)


def _around(
    weights: Weights,
    how: ForwardSpec,
    arithmetic: Arithmetic,
    called: CalledSteps | None,
    read: MemoryReader,
) -> tuple[Curve, Curve]:
    """What stands between products, by rows, and what the engine does around steps, by texts."""
    multiple = row_multiple(arithmetic.dtype, arithmetic.device)
    hollow = Hollow.of(weights, how, arithmetic, max(LARGE_ROWS), read)
    if called is None:
        between = [(float(n), hollow.between(n)) for n in BETWEEN_ROWS if n % multiple == 0]
        return line(between), line([(float(n), hollow.host(n)) for n in SEQUENCES])
    between = [(float(n), called.between(n)) for n in BETWEEN_ROWS]
    between += [(float(n), hollow.between(n)) for n in LARGE_ROWS]
    return line(between), line([(float(n), called.host(n)) for n in SEQUENCES])


def _copies(
    weights: Weights, product: Product, arithmetic: Arithmetic, total: int
) -> Iterator[Linear]:
    """The product's weight, or the first rows of it, so often that they have `total` bytes, or more
    than caches hold."""
    (n, k), sample = product.shape, product.sample
    assert sample is not None, "workload_of gives one of each"
    most = MOST_WEIGHTS if product.stored == DENSE else MOST_PACKED
    # Codes are those of the sample; where several are joined, the rest of them takes as long.
    rows = min(
        n if product.stored == DENSE else sample.shape[0],
        max(1, most // k // _WHOLE_ROWS) * _WHOLE_ROWS,
    )
    count = _count(min(COLD_BYTES, total), product, rows)
    if product.stored == DENSE:
        # One of several, or a tied embedding, whose codes would be decoded; values do not matter.
        facts = facts_of(weights, sample)  # a joint weight has the form of its parts
        values = torch.full((rows, k), 0.01, dtype=facts.stored)
        weight: LinearWeight = pack_dense(values, facts, arithmetic)
        inputs = None
    else:
        weight = _packed(weights, sample, slice(0, rows), arithmetic)
        inputs = weights.activation(sample.name)
    for _ in range(count):
        yield Linear(deepcopy(weight), None, inputs)


def _packed(
    weights: Weights, sample: LinearSpec, rows: slice, arithmetic: Arithmetic
) -> LinearWeight:
    """Some rows of a linear's codes."""
    facts, blocks = facts_of(weights, sample), weights.blocks(sample.tensor)
    if blocks is not None:
        return pack_blocks(blocks.rows(rows), facts, arithmetic)
    quantized = weights.quantized(sample.tensor)
    assert quantized is not None, "it has a scheme"
    return pack_codes(quantized.part(rows), facts, arithmetic)


def _count(total: int, product: Product, rows: int) -> int:
    """Copies of so many rows of a product's weight that have `total` bytes together."""
    return max(1, -(-total * product.shape[0] // (product.nbytes * rows)))


def _product(
    linears: list[Linear], product: Product, multiple: int, timer: Timer, dtype: torch.dtype
) -> tuple[Curve, bool]:
    """Seconds of the whole product by rows, and whether rows had the same bits in all numbers."""
    (n, k), first = product.shape, linears[0]
    x = torch.rand(max(PRODUCT_ROWS), k, dtype=torch.float32).to(timer.device, dtype)
    alone = first(x[:multiple])
    measured = alone.shape[1]
    points, same, turn = [], True, cycle(linears)
    for rows in PRODUCT_ROWS:
        if rows % multiple:
            continue
        same &= torch.equal(first(x[:rows])[:multiple], alone)
        once = timer.every(partial(_go, turn, x[:rows], 1))[-1]
        calls = min(len(linears), max(1, int(BURST / once) if once else 1))
        seconds = timer.seconds(partial(_go, turn, x[:rows], calls))
        points.append((float(rows), seconds / calls * n / measured))
    return line(points), same


def _called_product(
    linears: list[Linear],
    product: Product,
    total: Callable[[int], int],
    timer: Timer,
    dtype: torch.dtype,
) -> Curve:
    """As `_product`, in one call for all copies, with the choice behind a head. total: bytes that
    are read in a step of so many texts."""
    calls = CalledProducts.of(linears, max(PRODUCT_ROWS), product.part == "head", dtype)
    (n, _), measured = product.shape, linears[0].weight.shape[0]
    points = []
    for rows in PRODUCT_ROWS:
        copies = min(len(linears), _count(total(rows), product, measured))
        seconds = calls.seconds(rows, copies, timer, BURST)
        points.append((float(rows), seconds * n / measured))
    return line(points)


def _go(turn: Iterator[Linear], x: Tensor, count: int) -> None:
    for _ in range(count):
        next(turn)(x)


def _looks(
    how: ForwardSpec, part: AttentionWork, dtypes: tuple[torch.dtype, torch.dtype], timer: Timer
) -> LookRates:
    """dtypes: of what is computed, and of keys and values."""
    length = min(POSITIONS, how.layers[part.sample].window or POSITIONS)
    text = -(-length // BLOCK) * BLOCK * part.state_bytes
    single = []
    for nbytes in STATE_BYTES:
        texts = max(1, min(MOST, nbytes // text))
        at = torch.arange(texts, device=timer.device, dtype=torch.int32)
        last = torch.full_like(at, length - 1, dtype=torch.int64)
        seen = _attention(how, part, (at, last), dtypes, timer)
        if length > 1:  # what does not depend on it stands between products
            seen -= _attention(how, part, (at, torch.zeros_like(last)), dtypes, timer)
        single.append((float(nbytes), max(0.0, seen) / (texts * max(1, length - 1))))
    positions = torch.arange(length, device=timer.device)
    places = torch.zeros_like(positions, dtype=torch.int32), positions
    pairs = length * (length + 1) // 2
    return LookRates(line(single), _attention(how, part, places, dtypes, timer) / pairs)


def _attention(
    how: ForwardSpec,
    part: AttentionWork,
    tokens: tuple[Tensor, Tensor],
    dtypes: tuple[torch.dtype, torch.dtype],
    timer: Timer,
) -> float:
    """Seconds of some tokens in one of the layers of `part`. tokens: the number of the text and the
    position of each; texts have as many positions as any token has."""
    device, (dtype, kv_dtype), (sequence, positions) = timer.device, dtypes, tokens
    layer = how.layers[part.sample]
    assert isinstance(layer, Grouped | Latent), "no other kind is computed"
    count, blocks = int(sequence[-1]) + 1, -(-(int(positions.max()) + 1) // BLOCK)
    one = replace(how, rows=(layer,), kinds=(0,))
    cache = KVCache(one, [1 + count * blocks], BLOCK, dtype=kv_dtype, device=device)
    table = torch.arange(1, 1 + count * blocks, dtype=torch.int32, device=device)
    stored = cache.keys_and_values(0)
    q = torch.rand(len(positions), layer.heads, stored.keys.shape[3], dtype=torch.float32)
    call = partial(
        paged_attention,
        q.to(device, dtype),
        stored,
        TokenPlaces(table.view(count, blocks), sequence, positions),
        scale=layer.scale,
        softcap=layer.softcap,
    )
    return timer.seconds(call, TIMES)
