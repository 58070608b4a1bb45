"""What the engine's operations take on this machine, each measured by itself, in seconds.

No step of a model is timed here, so that a prediction is one: products run on weights that caches
cannot hold, attention on keys and values of its own, what stands between products in a decoder
whose products compute nothing, and the planning of steps around that decoder.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec, describe_forward
from compress.arch.forward.kinds import Grouped, Latent
from compress.formats import Weights
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.linear import Linear, facts_of
from compress.runtime.forms.form import Arithmetic
from compress.runtime.forms.packed import DECODED
from compress.runtime.forms.table import pack_codes, pack_dense
from compress.speed.hollow import Hollow
from compress.speed.products import DENSE, workload_of
from compress.speed.roofline import Curve, EngineRates, Hardware, LookRates, line
from compress.speed.timer import Timer, measure_machine
from compress.speed.workload import AttentionWork, Product, Workload
from compress_kernels.ops.attention import paged_attention
from compress_kernels.ops.linear import row_multiple
from compress_kernels.paged import TokenPlaces

# Rows of products that are measured, as far as the engine has them; of what stands between them;
# sequences of the planning.
PRODUCT_ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
BETWEEN_ROWS = (1, 16, 256)
SEQUENCES = (1, 32)
# Weights of one product: of a larger one so many rows are measured, as the rest takes as long. Of
# packed ones two of the tiles in which they are decoded.
MOST_WEIGHTS, MOST_PACKED = 1 << 23, 2 * DECODED
# Weights that are gone through in turn, or as many as the model has: more than caches hold.
COLD_BYTES = 128 << 20
# Seconds between two looks at the clock, or those of one call.
BURST = 0.01
# Of the attention that is measured: positions of a text, bytes of all texts.
POSITIONS, STATE_BYTES, BLOCK = 256, 64 << 20, 16
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
) -> Calibrated:
    """Takes seconds; the weights are not loaded.

    how: of the engine, fp32 on the CPU where left out, with as many threads as torch has now.
    kv_dtype: of keys and values, its own where left out. machine: measured already. Errors:
    CheckpointError for a decoder that is in no table of forwards.
    """
    how = how or Arithmetic.here(torch.float32, "cpu")
    place, dtype = how.device, how.dtype
    timer = timer or Timer(place)
    work = workload_of(weights, dtype=dtype, kv_dtype=kv_dtype, device=place, math=how.math)
    machine = machine or measure_machine(dtype, timer)
    rates = measure_rates(weights, work, how, kv_dtype or dtype, timer)
    if place.type == "cuda":
        torch.cuda.empty_cache()  # an engine that opens next looks at what is free
    return Calibrated(work, machine, rates)


def measure_rates(
    weights: Weights, work: Workload, arithmetic: Arithmetic, kv_dtype: torch.dtype, timer: Timer
) -> EngineRates:
    """work: as `workload_of` gave it for the same weights, dtypes and math.

    Reads norms and one linear of each kind of quantized weights.
    """
    device, dtype = timer.device, arithmetic.dtype
    how = describe_forward(weights.checkpoint.config, weights.spec)
    curves, tiled, dtypes = [], False, (dtype, kv_dtype)
    multiple = row_multiple(dtype, device)
    with torch.inference_mode():
        for product in work.products:
            linears = list(_copies(weights, work, product, arithmetic))
            curve, same = _product(linears, product, multiple, timer, dtype)
            curves.append(curve)
            tiled |= not same
        looks = tuple(
            LookRates(*(_attention(how, part, texts, dtypes, timer) for texts in (None, 1)))
            for part in work.attention
        )
    hollow = Hollow.of(weights, how, dtype, max(BETWEEN_ROWS), timer)
    between = [(float(n), hollow.between(n)) for n in BETWEEN_ROWS if n % multiple == 0]
    host = [(float(n), hollow.host(n)) for n in SEQUENCES]
    return EngineRates(tuple(curves), looks, line(between), line(host), multiple, tiled)


def _copies(
    weights: Weights, work: Workload, product: Product, arithmetic: Arithmetic
) -> Iterator[Linear]:
    """The product's weight, or the first rows of it, so often that caches do not hold them all."""
    (n, k), sample = product.shape, product.sample
    assert sample is not None, "workload_of gives one of each"
    most = MOST_WEIGHTS if product.stored == DENSE else MOST_PACKED
    # Codes are those of the sample; where several are joined, the rest of them takes as long.
    rows = min(
        n if product.stored == DENSE else sample.shape[0],
        max(1, most // k // _WHOLE_ROWS) * _WHOLE_ROWS,
    )
    total = min(COLD_BYTES, work.weight_bytes)
    count = max(1, -(-total * n // (product.nbytes * rows)))
    facts = replace(facts_of(weights, sample), shape=product.shape)
    if product.stored == DENSE:
        # One of several, or a tied embedding, whose codes would be decoded; values do not matter.
        values = torch.full((rows, k), 0.01, dtype=facts.stored)
        weight, inputs = pack_dense(values, facts, arithmetic), None
    else:
        quantized = weights.quantized(sample.tensor)
        assert quantized is not None, "it has a scheme"
        weight = pack_codes(quantized.part(slice(0, rows)), facts, arithmetic)
        inputs = weights.activation(sample.name)
    for _ in range(count):
        yield Linear(deepcopy(weight), None, inputs)


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


def _go(turn: Iterator[Linear], x: Tensor, count: int) -> None:
    for _ in range(count):
        next(turn)(x)


def _attention(
    how: ForwardSpec,
    part: AttentionWork,
    texts: int | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    timer: Timer,
) -> float:
    """Seconds of one token and one position in one of the layers of `part`.

    dtypes: of what is computed, and of keys and values. texts: None for the last token of each of
    as many texts as caches do not hold; 1 for all tokens of one text.
    """
    device, (dtype, kv_dtype) = timer.device, dtypes
    layer = how.layers[part.sample]
    assert isinstance(layer, Grouped | Latent), "no other kind is computed"
    length = min(POSITIONS, layer.window or POSITIONS)
    blocks = -(-length // BLOCK)
    count = texts or max(1, min(64, STATE_BYTES // (blocks * BLOCK * part.state_bytes)))
    one = replace(how, rows=(layer,), kinds=(0,))
    cache = KVCache(one, [1 + count * blocks], BLOCK, dtype=kv_dtype, device=device)
    at = torch.arange(count if texts is None else length, device=device)
    table = torch.arange(1, 1 + count * blocks, dtype=torch.int32, device=device)
    stored = cache.keys_and_values(0)
    width = stored.keys.shape[3]
    q = torch.rand(len(at), layer.heads, width, dtype=torch.float32).to(device, dtype)
    call = partial(
        paged_attention,
        q,
        stored,
        TokenPlaces(
            table.view(count, blocks),
            (at if texts is None else torch.zeros_like(at)).to(torch.int32),
            torch.full_like(at, length - 1) if texts is None else at,
        ),
        scale=layer.scale,
        softcap=layer.softcap,
    )
    pairs = count * length if texts is None else length * (length + 1) // 2
    return timer.seconds(call) / pairs
