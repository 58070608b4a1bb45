"""Codes that no product reads packed: decoded once, and dense weights from then on."""

from dataclasses import dataclass, replace
from math import prod

from compress.quant.tensor import QuantizedTensor
from compress.runtime.forms.dense import DenseForm, dense_weight, kept_in
from compress.runtime.forms.form import Arithmetic, LinearFacts, LinearWeight

# Numbers of one weight, half a MB in 16 bits, that is decoded once whatever memory there is, and on
# a GPU. All weights of tale-6m are within (768 x 256 at most). Codes that are decoded for every
# product are for those who have no room otherwise: a Llama of 400M in groups of 4 then writes 0.03
# to 0.19 times the tokens of its source.
MOST_DECODED = 1 << 18


@dataclass(frozen=True, slots=True)
class DecodedOnce:
    """Takes every scheme, of weights that may be decoded: they have the numbers, the dtype and the
    products of the checkpoint's dense weights."""

    name: str = "codes that are decoded once"
    joins: bool = True

    def why_not(self, facts: LinearFacts, how: Arithmetic) -> str | None:
        most = how.most_decoded if how.device.type == "cpu" else MOST_DECODED
        if prod(facts.shape) > most:
            return f"{facts.shape[0]} x {facts.shape[1]} numbers are more than {most}"
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
