"""The product's verbs: plan, run, export, inspect, evaluate, roofline, bench. Each is loaded when
first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.pipeline.artifact import dry_artifact, export_artifact, is_target, target_name
    from compress.pipeline.artifact_report import table as artifact_table
    from compress.pipeline.bench import measure_speed
    from compress.pipeline.evaluating import evaluate_checkpoint
    from compress.pipeline.events import Event
    from compress.pipeline.export_report import table as export_table
    from compress.pipeline.exporting import dry_export, export
    from compress.pipeline.inspection import inspect_checkpoint
    from compress.pipeline.inspection_table import inspect_table
    from compress.pipeline.job import run
    from compress.pipeline.models import open_model
    from compress.pipeline.plan import Plan
    from compress.pipeline.planning import make_plan
    from compress.pipeline.roofline import predict_speed
    from compress.pipeline.speed_lines import speed_table
    from compress.pipeline.table import plan_table

_PLACES = {
    "Event": "compress.pipeline.events",
    "Plan": "compress.pipeline.plan",
    "artifact_table": "compress.pipeline.artifact_report",
    "dry_artifact": "compress.pipeline.artifact",
    "dry_export": "compress.pipeline.exporting",
    "evaluate_checkpoint": "compress.pipeline.evaluating",
    "export": "compress.pipeline.exporting",
    "export_artifact": "compress.pipeline.artifact",
    "export_table": "compress.pipeline.export_report",
    "inspect_checkpoint": "compress.pipeline.inspection",
    "inspect_table": "compress.pipeline.inspection_table",
    "is_target": "compress.pipeline.artifact",
    "make_plan": "compress.pipeline.planning",
    "measure_speed": "compress.pipeline.bench",
    "open_model": "compress.pipeline.models",
    "plan_table": "compress.pipeline.table",
    "predict_speed": "compress.pipeline.roofline",
    "run": "compress.pipeline.job",
    "speed_table": "compress.pipeline.speed_lines",
    "target_name": "compress.pipeline.artifact",
}

# Where its module has another name for it.
_CALLED = {"artifact_table": "table", "export_table": "table"}

__all__ = [
    "Event",
    "Plan",
    "artifact_table",
    "dry_artifact",
    "dry_export",
    "evaluate_checkpoint",
    "export",
    "export_artifact",
    "export_table",
    "inspect_checkpoint",
    "inspect_table",
    "is_target",
    "make_plan",
    "measure_speed",
    "open_model",
    "plan_table",
    "predict_speed",
    "run",
    "speed_table",
    "target_name",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), _CALLED.get(name, name))
    raise AttributeError(f"module 'compress.pipeline' has no attribute {name!r}")
