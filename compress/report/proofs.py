"""How far an artifact was proved, in words."""

from collections.abc import Mapping

from compress.report.schema import Export
from compress.report.units import significant

UNPROVED = "none"
LEVELS: Mapping[str, str] = {
    UNPROVED: "not verified",
    "form": "well-formed",
    "loads": "its runtime opens it",
    "logits": "logits are those of the weights",
    "tokens": "logits and greedy tokens are those of the weights",
}


def proved(export: Export) -> str:
    """The level, and the largest difference of a logit where some were compared."""
    error = export.max_logit_error
    within = "" if error is None else f" (largest difference of a logit {significant(error)})"
    return f"{LEVELS.get(export.proof, export.proof)}{within}"
