"""How far an artifact was proved, in words."""

from collections.abc import Mapping

from compress.report.records.loads import StockLoad
from compress.report.schema import Export
from compress.report.units import significant

UNPROVED = "none"
LEVELS: Mapping[str, str] = {
    UNPROVED: "not verified",
    "form": "well-formed",
    "loads": "its runtime opens it",
    "logits": "logits are those of the stored weights",
    "tokens": "logits and greedy tokens are those of the stored weights",
}


def proved(export: Export) -> str:
    """The level, and the largest difference of a logit where some were compared."""
    return _level(export.proof, export.max_logit_error)


def loaded(load: StockLoad) -> str:
    """In what plain transformers the model loads, and how far that was proved."""
    where = f"transformers {load.transformers}, {load.model_class}"
    return f"{where}: {_level(load.proof, load.max_logit_error)}"


def _level(proof: str, error: float | None) -> str:
    within = "" if error is None else f" (largest difference of a logit {significant(error)})"
    return f"{LEVELS.get(proof, proof)}{within}"
