"""What a selection may look at: a linear, its inputs, and what makes them."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from compress_calibration.moments import Moments
from compress_calibration.sequences import SequenceAccumulator

Want = Literal["producers", "moments", "sequences", "gradients"]


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """A linear whose K input channels are to be cut, and what was seen of them.

    weight: [N, K], of the linear that reads the channels (`down`, `o`). producers: weights [K, *]
    whose row c makes channel c (`gate` and `up`; `q`, and `k` and `v` where they go with it).
    moments: of what the channels hold, and of no targets. changes: of the loss without each
    channel, to first order, for weight and each of the producers, fp64 [K]. What a selection does
    not want (`Criterion.wants`) may be None or empty.
    """

    weight: Tensor
    producers: tuple[Tensor, ...] = ()
    moments: Moments | None = None
    sequences: SequenceAccumulator | None = None
    changes: tuple[Tensor, ...] = ()
