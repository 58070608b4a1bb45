"""The product's verbs: plan, run, inspect, evaluate. Each is loaded when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.pipeline.evaluating import evaluate_checkpoint
    from compress.pipeline.events import Event
    from compress.pipeline.inspection import inspect_checkpoint, inspect_table
    from compress.pipeline.job import make_plan, run
    from compress.pipeline.plan import Plan
    from compress.pipeline.table import plan_table

_PLACES = {
    "Event": "compress.pipeline.events",
    "Plan": "compress.pipeline.plan",
    "evaluate_checkpoint": "compress.pipeline.evaluating",
    "inspect_checkpoint": "compress.pipeline.inspection",
    "inspect_table": "compress.pipeline.inspection",
    "make_plan": "compress.pipeline.job",
    "plan_table": "compress.pipeline.table",
    "run": "compress.pipeline.job",
}

__all__ = [
    "Event",
    "Plan",
    "evaluate_checkpoint",
    "inspect_checkpoint",
    "inspect_table",
    "make_plan",
    "plan_table",
    "run",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'compress.pipeline' has no attribute {name!r}")
