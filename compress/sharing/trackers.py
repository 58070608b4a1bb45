"""The trackers that are known by name, each a function that gets the metrics once, at the end.

Where they keep them is said in their own environment variables: MLFLOW_TRACKING_URI and
MLFLOW_EXPERIMENT_NAME, WANDB_PROJECT and WANDB_MODE, TENSORBOARD_LOGGING_DIR. A run that is active,
as in a notebook, stays open: MLflow's gets a run below it, W&B's gets the metrics itself.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from compress.errors import DependencyError, OutputError
from compress.sharing.metrics import RunMetrics

Hook = Callable[[RunMetrics], None]
PROJECT = "compress-model"  # of W&B, where WANDB_PROJECT names none


@dataclass(frozen=True, slots=True)
class Tracker:
    """log: gives the metrics to it. module: what it needs; extra: that installs it."""

    log: Hook
    module: str
    extra: str


def hook_of(asked: str | Hook) -> Hook:
    """A tracker by its name, or a function as it is.

    OutputError for a name that is none, DependencyError for one that is not installed.
    """
    if callable(asked):
        return asked
    if asked not in TRACKERS:
        raise OutputError(f"no tracker is called {asked!r}; there are {', '.join(TRACKERS)}")
    tracker = TRACKERS[asked]
    if find_spec(tracker.module) is None:
        raise DependencyError(
            f"{asked} is not installed; pip install 'compress-model[{tracker.extra}]'"
        )
    return tracker.log


def log_to_mlflow(metrics: RunMetrics) -> None:
    """A run with settings as parameters, values and curves as metrics, and the report's files."""
    mlflow = import_module("mlflow")
    # A setting of a run cannot be changed, so that an active one, as of a notebook, gets children.
    with mlflow.start_run(run_name=metrics.name, nested=mlflow.active_run() is not None):
        mlflow.log_params(dict(metrics.settings))
        mlflow.log_metrics(dict(metrics.values))
        for curve in metrics.curves:
            for step, value in zip(curve.steps, curve.values, strict=True):
                mlflow.log_metric(curve.name, value, step=step)
        for file in metrics.files:
            mlflow.log_artifact(str(file), "report")


def log_to_wandb(metrics: RunMetrics) -> None:
    """A run with settings as config, values as its summary, curves as history, and the files."""
    wandb = import_module("wandb")
    active, settings = wandb.run, dict(metrics.settings)
    if active is None:
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        run = wandb.init(project=project, name=metrics.name, config=settings)
    else:
        run = active
        run.config.update(settings, allow_val_change=True)
    try:
        for curve in metrics.curves:
            # Steps of W&B only grow; those of several curves do not.
            run.define_metric(curve.name, step_metric=f"{curve.name}/step")
            for step, value in zip(curve.steps, curve.values, strict=True):
                run.log({curve.name: value, f"{curve.name}/step": step})
        run.summary.update(dict(metrics.values))
        for file in metrics.files:
            run.save(str(file), base_path=str(file.parent), policy="now")
    finally:
        if active is None:
            run.finish()


def log_to_tensorboard(metrics: RunMetrics) -> None:
    """Event files in a folder of the run's name, below TENSORBOARD_LOGGING_DIR or runs/."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter
    root = Path(os.environ.get("TENSORBOARD_LOGGING_DIR", "runs"))
    with writer(str(_unused(root / re.sub(r"[^\w.-]+", "-", metrics.name)))) as board:
        rows = "".join(f"| {name} | {value} |\n" for name, value in metrics.settings.items())
        board.add_text("settings", f"| | |\n|---|---|\n{rows}")
        for name, value in metrics.values.items():
            board.add_scalar(name, value)
        for curve in metrics.curves:
            for step, value in zip(curve.steps, curve.values, strict=True):
                board.add_scalar(curve.name, value, step)


def _unused(folder: Path) -> Path:
    """The folder, or with the first number behind it that gives a new one."""
    number, found = 1, folder
    while found.exists():
        number, found = number + 1, folder.with_name(f"{folder.name}-{number + 1}")
    return found


TRACKERS: Mapping[str, Tracker] = MappingProxyType(
    {
        "mlflow": Tracker(log_to_mlflow, "mlflow", "mlflow"),
        "wandb": Tracker(log_to_wandb, "wandb", "wandb"),
        "tensorboard": Tracker(log_to_tensorboard, "tensorboard", "tensorboard"),
    }
)
