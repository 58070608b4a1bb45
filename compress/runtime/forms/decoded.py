"""Small codes that no product reads packed: decoded once, and dense weights from then on."""

from dataclasses import dataclass, replace
from math import prod

from compress.quant.tensor import QuantizedTensor
from compress.runtime.forms.dense import DenseForm, dense_weight, kept_in
from compress.runtime.forms.form import Arithmetic, LinearFacts, LinearWeight

# Numbers of one weight: half a MB in 16 bits. All weights of tale-6m are within (768 x 256 at
# most), where a step took 38 times as long as the source's with codes decoded for every product. A
# weight of 1024 x 1024 is not: from there on codes are chosen for the memory that they save, and
# int4 in groups of 4 takes half of what it takes decoded, int4 in groups of 8 three eighths.
MOST_DECODED = 1 << 18


@dataclass(frozen=True, slots=True)
class DecodedOnce:
    """Takes every scheme, of weights that are small: they have the numbers, the dtype and the
    products of the checkpoint's dense weights."""

    name: str = "codes that are decoded once"
    joins: bool = True

    def why_not(self, facts: LinearFacts, how: Arithmetic) -> str | None:
        rows, columns = facts.shape
        if prod(facts.shape) > MOST_DECODED:
            return f"{rows} x {columns} numbers are more than {MOST_DECODED}"
        return None

    def nbytes(self, facts: LinearFacts, how: Arithmetic) -> int:
        return DenseForm().nbytes(as_dense(facts), how)

    def pack(self, weight: QuantizedTensor, facts: LinearFacts, how: Arithmetic) -> LinearWeight:
        """Rounded to `plain` first, as those that are decoded for every product."""
        values = weight.dequantize(facts.plain)  # [N, K]
        return dense_weight(values.to(how.device, kept_in(facts.plain, how)), how)


def as_dense(facts: LinearFacts) -> LinearFacts:
    """Of the decoded weight."""
    return replace(facts, scheme=None, stored=facts.plain, factored=False, blocks=None)
