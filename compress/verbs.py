"""The product's verbs: plan, run, compare, export, inspect, evaluate, roofline, bench. Each is
loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.artifacts.export import dry_artifact, export_artifact
    from compress.artifacts.plan import ArtifactTarget, is_target, target_name
    from compress.artifacts.report import table as artifact_table
    from compress.comparison.compare import compare
    from compress.comparison.options import CompareOptions
    from compress.convert.convert import Conversion, dry_export, export
    from compress.convert.report import table as export_table
    from compress.evaluation.evaluate_checkpoint import EvaluationOptions, evaluate_checkpoint
    from compress.events import Event
    from compress.inspect.inspect import inspect_checkpoint
    from compress.inspect.table import inspect_table
    from compress.plan.plan import Plan
    from compress.plan.table import plan_table
    from compress.runs.options import RunOptions
    from compress.runs.planning import make_plan
    from compress.runs.run import run
    from compress.serve.open_model import CacheOptions, open_model
    from compress.sharing.share import ready
    from compress.speed.bench import measure_speed
    from compress.speed.predict import predict_speed
    from compress.speed.table import speed_table

_PLACES = {
    "ArtifactTarget": "compress.artifacts.plan",
    "CacheOptions": "compress.serve.open_model",
    "CompareOptions": "compress.comparison.options",
    "Conversion": "compress.convert.convert",
    "EvaluationOptions": "compress.evaluation.evaluate_checkpoint",
    "Event": "compress.events",
    "Plan": "compress.plan.plan",
    "RunOptions": "compress.runs.options",
    "artifact_table": "compress.artifacts.report",
    "compare": "compress.comparison.compare",
    "dry_artifact": "compress.artifacts.export",
    "dry_export": "compress.convert.convert",
    "evaluate_checkpoint": "compress.evaluation.evaluate_checkpoint",
    "export": "compress.convert.convert",
    "export_artifact": "compress.artifacts.export",
    "export_table": "compress.convert.report",
    "inspect_checkpoint": "compress.inspect.inspect",
    "inspect_table": "compress.inspect.table",
    "is_target": "compress.artifacts.plan",
    "make_plan": "compress.runs.planning",
    "measure_speed": "compress.speed.bench",
    "open_model": "compress.serve.open_model",
    "plan_table": "compress.plan.table",
    "predict_speed": "compress.speed.predict",
    "ready": "compress.sharing.share",
    "run": "compress.runs.run",
    "speed_table": "compress.speed.table",
    "target_name": "compress.artifacts.plan",
}

# Where its module has another name for it.
_CALLED = {"artifact_table": "table", "export_table": "table"}

__all__ = [
    "ArtifactTarget",
    "CacheOptions",
    "CompareOptions",
    "Conversion",
    "EvaluationOptions",
    "Event",
    "Plan",
    "RunOptions",
    "artifact_table",
    "compare",
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
    "ready",
    "run",
    "speed_table",
    "target_name",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), _CALLED.get(name, name))
    raise AttributeError(f"module 'compress.verbs' has no attribute {name!r}")
