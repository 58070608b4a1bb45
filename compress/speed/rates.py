"""What the engine's operations take on this machine, each measured by itself, in seconds.

No step of a model is timed here, so that a prediction is one: products run on weights that lie in
caches as far as the model's do, attention on keys and values of its own, what stands between
products in a decoder whose products compute nothing, and the planning of steps around that decoder.
Where the engine's steps are one call, products and what stands between them are ops of such calls.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec, describe_forward
from compress.arch.spec import LinearSpec
from compress.formats import Weights
from compress.runtime.decoder.calls import why_no_call
from compress.runtime.decoder.linear import Linear, facts_of
from compress.runtime.decoder.one_call import MOST, why_no_calls
from compress.runtime.forms.form import Arithmetic, LinearWeight
from compress.runtime.forms.packed import DECODED
from compress.runtime.forms.table import pack_blocks, pack_codes, pack_dense
from compress.speed.called import CalledProducts, CalledSteps
from compress.speed.hollow import Hollow, MemoryReader
from compress.speed.looks import CACHE_BYTES, measure_looks
from compress.speed.products import DENSE, workload_of
from compress.speed.roofline import (
    Curve,
    EngineRates,
    Hardware,
    ProductRates,
    bytes_read,
    line,
)
from compress.speed.timer import Timer, measure_machine
from compress.speed.workload import Product, Workload, decode_load
from compress_kernels.ops.linear import row_multiple

# Rows of products that are measured, as far as the engine has them; of what stands between them, in
# steps that are one call and in larger ones; sequences of the planning.
PRODUCT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BETWEEN_ROWS = (1, 16, MOST)
LARGE_ROWS = (MOST + 1, 2 * MOST)
SEQUENCES = (1, 32)
# Weights of one product: of a larger one so many rows are measured, as the rest takes as long. Of
# packed ones two of the tiles in which they are decoded.
MOST_WEIGHTS, MOST_PACKED = 1 << 23, 2 * DECODED
# Weights that are gone through in turn, or as many as the model has: more than caches hold. Of 128
# MB a cache of 32 had a part again: a step of one text of 400M parameters with two threads, which
# wait for memory, was predicted to take 0.75 of its time.
COLD_BYTES = 256 << 20
# Seconds between two looks at the clock, or those of one call.
BURST = 0.01
# Copies of a weight, at most: of small ones more would take longer to make than they tell.
MOST_COPIES = 512
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
    products, tiled = list[ProductRates](), False
    multiple = row_multiple(dtype, device)

    def total(texts: int) -> int:
        """Bytes that a step reads."""
        return int(bytes_read(work, decode_load(work, texts, length)))

    read = MemoryReader.of(timer, total(max(PRODUCT_ROWS)))
    called = None
    if are_calls(weights, work, arithmetic):
        called = CalledSteps.of(weights, how, arithmetic, read, total)
    least = work.weight_bytes - work.other_bytes
    with torch.inference_mode():
        for product in work.products:
            linears = list(_copies(weights, product, arithmetic, max(least, CACHE_BYTES[-1])))
            choose = product.part == "head"
            if called is None or (choose and not called.chooses(linears[0])):
                curve, same = _product(linears, product, multiple, timer, dtype)
                tiled |= not same
                products.append(ProductRates(((0.0, curve),)))
            else:
                products.append(_called_product(linears, product, least, timer, dtype))
        looks = tuple(measure_looks(how, part, (dtype, kv_dtype), timer) for part in work.attention)
    between, host = _around(weights, how, arithmetic, called, read)
    return EngineRates(tuple(products), looks, between, host, multiple, tiled)


def are_calls(weights: Weights, work: Workload, arithmetic: Arithmetic) -> bool:
    """Whether the products of all layers may be part of a call."""
    if why_no_calls(arithmetic.dtype, arithmetic.device) is not None:
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
    count = min(MOST_COPIES, _count(min(COLD_BYTES, total), product, rows))
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
    linears: list[Linear], product: Product, least: int, timer: Timer, dtype: torch.dtype
) -> ProductRates:
    """As `_product`, in one call for all copies, with the choice behind a head. least: bytes that
    every step reads; with more, for keys and values, less of the weight lies in caches."""
    calls = CalledProducts.of(linears, max(PRODUCT_ROWS), product.part == "head", dtype)
    (n, _), measured = product.shape, linears[0].weight.shape[0]
    found = {}
    for nbytes in (least, max(least, CACHE_BYTES[-1])):
        copies = min(len(linears), _count(nbytes, product, measured))
        if copies not in found:
            points = [(rows, calls.seconds(rows, copies, timer, BURST)) for rows in PRODUCT_ROWS]
            scaled = [(float(rows), seconds * n / measured) for rows, seconds in points]
            found[copies] = float(nbytes), line(scaled)
    return ProductRates(tuple(found.values()))


def _go(turn: Iterator[Linear], x: Tensor, count: int) -> None:
    for _ in range(count):
        next(turn)(x)
