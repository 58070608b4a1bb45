"""How long a step takes: at best on this machine, and with the operations that the engine has.

At best a step takes as long as the bytes it must read or the products it must compute, whichever is
longer. The engine takes longer: rows come in sixteens, codes are decoded, Python plans the step.
Each of these was measured by itself (rates.py), and here they are added up; nothing is fitted to
the steps of a model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from compress.speed.workload import (
    Looks,
    Product,
    StepLoad,
    Workload,
    decode_load,
    prompt_loads,
    touched,
)
from compress_kernels.ops.linear import ROWS

# Of the highest throughput: the smallest batch that gives so much of it is the best one.
ENOUGH = 0.95
# Rows among which the batch is looked for from which on products take longer than bytes.
_MOST_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class Hardware:
    """bandwidth: bytes read a second. flops: floating-point operations a second in the dtype of the
    model. free_bytes: memory, None where the system does not say.
    """

    bandwidth: float
    flops: float
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """points: (rows or what else counts, seconds), ascending; straight lines between and beyond
    them."""

    points: tuple[tuple[float, float], ...]

    @property
    def end(self) -> float:
        """Of what was measured."""
        return self.points[-1][0]

    def at(self, rows: float) -> float:
        """Seconds, never less than the first point's for fewer rows."""
        (low, seconds), *more = self.points
        if rows <= low or not more:
            return seconds
        for (x, y), (high, then) in pairwise(self.points):
            if rows <= high or high == self.points[-1][0]:
                return y + (then - y) * (rows - x) / (high - x)
        raise AssertionError("the last line goes on")


@dataclass(frozen=True, slots=True)
class ProductRates:
    """Seconds of one product. by_bytes: (bytes that a step reads, seconds by rows), ascending, as
    these decide how much of the weights lies in caches; straight lines between them."""

    by_bytes: tuple[tuple[float, Curve], ...]

    def at(self, rows: float, read: float) -> float:
        """Seconds, in a step that reads so many bytes; fewer or more than were measured count as
        the least and the most of these."""
        seconds = line([(nbytes, curve.at(rows)) for nbytes, curve in self.by_bytes])
        return seconds.at(min(read, seconds.end))


@dataclass(frozen=True, slots=True)
class LookRates:
    """Seconds of one token and one position in one layer, as in Looks. single: by the bytes that a
    step reads, as these decide what lies in caches."""

    single: Curve
    several: float


@dataclass(frozen=True, slots=True)
class EngineRates:
    """What the engine's operations were measured to take, in seconds.

    products: of each of the workload's products one call; that of a head with the choice of the
    highest where steps are one call. looks: of each part of its attention. between: of all
    layers together what stands between products, by rows. host: planning, sampling and bookkeeping,
    by sequences. multiple: rows are filled up to it. tiled: products are computed 16 rows at a
    time, as their bits depend on neighbours otherwise.
    """

    products: tuple[ProductRates, ...]
    looks: tuple[LookRates, ...]
    between: Curve
    host: Curve
    multiple: int = 1
    tiled: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step, by what takes them."""

    products: float
    head: float
    attention: float
    between: float
    host: float

    @property
    def total(self) -> float:
        return self.products + self.head + self.attention + self.between + self.host


def bytes_read(work: Workload, load: StepLoad) -> float:
    """Weights, once for all tokens, and the keys and values that are looked at."""
    return weights_read(work, load) + states_read(work, load)


def weights_read(work: Workload, load: StepLoad) -> float:
    """Bytes of weights in a step."""
    weights = 0.0
    for product in work.products:
        share: float = bool(load.wanted) or product.part != "head"
        if product.part == "expert":
            share = touched(product.experts, work.chosen, load.tokens) / product.experts
        weights += share * product.count * product.nbytes
    return weights


def states_read(work: Workload, load: StepLoad) -> float:
    """Bytes of keys and values in a step."""
    return sum(
        look.states * part.state_bytes
        for part, look in zip(work.attention, load.looks, strict=True)
    )


def operations(work: Workload, load: StepLoad) -> float:
    """Additions and multiplications of products and attention, without any padding."""
    return product_operations(work, load) + attention_operations(work, load)


def product_operations(work: Workload, load: StepLoad) -> float:
    """As `operations`, of products alone."""
    products = 0.0
    for product in work.products:
        rows = load.wanted if product.part == "head" else load.tokens
        if product.part == "expert":
            rows = load.tokens * (work.chosen / product.experts)
        products += rows * product.count * product.weights
    return 2 * products


def attention_operations(work: Workload, load: StepLoad) -> float:
    """As `operations`, of attention alone."""
    return 2 * sum(
        part.products * (look.single + look.several)
        for part, look in zip(work.attention, load.looks, strict=True)
    )


def intensity(work: Workload, load: StepLoad) -> float:
    """Operations for each byte that is read."""
    return operations(work, load) / bytes_read(work, load)


def ceiling(work: Workload, machine: Hardware, load: StepLoad) -> float:
    """Seconds of a step on this machine at best."""
    read = bytes_read(work, load) / machine.bandwidth
    return max(read, operations(work, load) / machine.flops)


def expected(work: Workload, rates: EngineRates, load: StepLoad) -> Cost:
    """What the step is expected to take with the engine's operations."""
    body, head, read = 0.0, 0.0, bytes_read(work, load)
    for product, each in zip(work.products, rates.products, strict=True):
        seconds = _product(each, read, rates)
        if product.part == "head":
            head += product.count * seconds(load.wanted)
        elif product.part == "block":
            body += product.count * seconds(load.tokens)
        else:
            body += _experts(work, product, seconds, load.tokens)
    return Cost(
        products=body,
        head=head,
        attention=sum(
            look.single * rate.single.at(min(read, rate.single.end)) + look.several * rate.several
            for look, rate in zip(load.looks, rates.looks, strict=True)
        ),
        between=rates.between.at(_padded(load.tokens, rates.multiple)),
        host=rates.host.at(load.sequences),
    )


def first_token(work: Workload, rates: EngineRates, prompt: int, most: int) -> float:
    """Seconds to the first token of a prompt that is served alone, `most` tokens in a step."""
    return sum(expected(work, rates, load).total for load in prompt_loads(work, prompt, most))


def first_token_ceiling(work: Workload, machine: Hardware, prompt: int, most: int) -> float:
    """As `first_token`, at best."""
    return sum(ceiling(work, machine, load) for load in prompt_loads(work, prompt, most))


def compute_bound_batch(work: Workload, machine: Hardware) -> float:
    """The batch at which a step's products take as long as reading the weights, at best; with more
    texts at once products decide. Of short texts: keys and values are left out. Infinite where
    bytes always decide."""

    def computes(batch: float) -> bool:
        load = StepLoad(batch, batch, batch, (Looks(),) * len(work.attention))
        return operations(work, load) / machine.flops >= bytes_read(work, load) / machine.bandwidth

    if not computes(_MOST_ROWS):
        return float("inf")
    low, high = 0.0, float(_MOST_ROWS)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if computes(middle) else (middle, high)
    return high


def best_batch(work: Workload, rates: EngineRates, length: int, most: int) -> int:
    """The smallest batch with nearly the highest throughput, of texts of `length` tokens.

    most: texts that may run at once, as many as their keys and values have room.
    """
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    sizes += [most] if most > sizes[-1] else []
    throughput = _throughput(work, rates, length)
    highest = max(map(throughput, sizes))
    return next(size for size in sizes if throughput(size) >= ENOUGH * highest)


def texts_that_fit(work: Workload, free: int, length: int, block: int) -> int:
    """Texts of `length` tokens whose keys and values fit into so many bytes, in blocks."""
    return free // work.kv_bytes(-(-length // block) * block)


def _throughput(work: Workload, rates: EngineRates, length: int) -> Callable[[int], float]:
    def of(batch: int) -> float:
        return batch / expected(work, rates, decode_load(work, batch, length)).total

    return of


def _experts(
    work: Workload, product: Product, seconds: Callable[[float], float], tokens: float
) -> float:
    """Each touched expert has its share of the tokens. seconds: of one, by rows."""
    found = touched(product.experts, work.chosen, tokens)
    return product.count * found / product.experts * seconds(tokens * work.chosen / found)


def _product(each: ProductRates, read: float, rates: EngineRates) -> Callable[[float], float]:
    """Seconds by rows, in a step that reads so many bytes."""

    def of(rows: float) -> float:
        if not rows:
            return 0.0
        if rates.tiled:
            return _padded(rows, ROWS) / ROWS * each.at(ROWS, read)
        return each.at(_padded(rows, rates.multiple), read)

    return of


def _padded(rows: float, multiple: int) -> float:
    return -(-rows // multiple) * multiple


def line(points: Sequence[tuple[float, float]]) -> Curve:
    """A curve that does not fall: of measured points, one that is lower than the last before it is
    as high as that."""
    highest, found = 0.0, []
    for rows, seconds in points:
        highest = max(highest, seconds)
        found.append((rows, highest))
    return Curve(tuple(found))
