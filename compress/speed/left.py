"""What an expected step takes above what bandwidth and arithmetic allow, and where."""

from dataclasses import dataclass

from compress.speed.roofline import (
    Cost,
    Hardware,
    attention_operations,
    product_operations,
    states_read,
    weights_read,
)
from compress.speed.workload import StepLoad, Workload


@dataclass(frozen=True, slots=True)
class Left:
    """Seconds of a step above what bandwidth and arithmetic allow, by where they are.

    weights, compute: of products, where reading them decides, and where multiplying does; the other
    is nothing. cache: of attention. between: of what stands between products. outside: of
    compiled code, where the engine plans its step.
    """

    weights: float
    compute: float
    cache: float
    between: float
    outside: float


def left(work: Workload, machine: Hardware, load: StepLoad, cost: Cost) -> Left:
    """What better code could gain of the expected cost. Nothing of what caches make faster than
    memory is."""
    read = weights_read(work, load) / machine.bandwidth
    computed = product_operations(work, load) / machine.flops
    products = max(0.0, cost.products + cost.head - max(read, computed))
    seen = max(
        states_read(work, load) / machine.bandwidth,
        attention_operations(work, load) / machine.flops,
    )
    return Left(
        weights=products if read >= computed else 0.0,
        compute=products if read < computed else 0.0,
        cache=max(0.0, cost.attention - seen),
        between=cost.between,
        outside=cost.host,
    )
