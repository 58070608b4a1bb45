"""What an export for another runtime would write, known before anything is written."""

from dataclasses import dataclass, field
from pathlib import Path

from compress.artifacts.imatrix_place import ImatrixPlace
from compress.checkpoint import Checkpoint, resolve_model
from compress.checkpoint.ties import settled
from compress.errors import RecipeError
from compress.formats import Weights, open_weights
from compress.formats.open_weights import refuse_gguf
from compress_exporters.exporter import Exporter, InPlace, Options, PlannedExport
from compress_exporters.table import EXPORTERS


@dataclass(frozen=True, slots=True)
class ArtifactTarget:
    """What an artifact is for, and how it is made. name: a key of EXPORTERS, as `--to` takes it."""

    name: str
    options: Options = field(default_factory=Options)


@dataclass(frozen=True, slots=True, eq=False)
class ArtifactPlan:
    """What an export would write: `planned`, by the target `exporter` of `source`. imatrix: where
    what its text makes columns multiply goes, if anywhere."""

    source: Weights
    exporter: Exporter
    options: Options
    planned: PlannedExport
    imatrix: ImatrixPlace | None = None

    @property
    def beside(self) -> InPlace | None:
        """How it goes beside the source's weights, if it does."""
        return self.exporter.in_place if self.options.in_place else None


def is_target(to: str) -> bool:
    """Whether `--to` names an artifact and not a format of checkpoints."""
    return target_name(to) in EXPORTERS


def target_name(to: str) -> str:
    return to.strip().lower().replace("_", "-")


def plan_artifact(
    model: str | Path, target: ArtifactTarget, out: str | Path | None = None
) -> ArtifactPlan:
    """CheckpointError or RecipeError for what the target cannot say, and for a folder `out` where
    the artifact goes beside the weights."""
    exporter, options = check_asked(target, out), target.options
    checkpoint = Checkpoint.open(resolve_model(model))
    refuse_gguf(checkpoint)
    weights = open_weights(checkpoint)
    source = weights.with_checkpoint(settled(weights.checkpoint, weights.spec))
    return ArtifactPlan(source, exporter, options, exporter.plan(source, options))


def check_asked(target: ArtifactTarget, out: str | Path | None) -> Exporter:
    """The target's. RecipeError for options that it does not take, alone or together, before
    anything on a disk is looked at."""
    exporter, options = EXPORTERS[target_name(target.name)], target.options
    if options.max_context is not None and options.max_context < 1:
        raise RecipeError(f"--max-context is {options.max_context}; it is 1 position or more")
    check_options(exporter, options)
    _check_text(options)
    if options.in_place:
        _require_in_place(exporter, out)
    return exporter


def check_options(exporter: Exporter, options: Options) -> None:
    """RecipeError for a dtype, or a type of blocks, that the target does not have."""
    if options.dtype is not None and options.dtype not in exporter.dtypes:
        raise RecipeError(
            f"--dtype is {options.dtype}, and --to {exporter.name} has"
            f" {' and '.join(exporter.dtypes)}"
        )
    for name in ("embedding", "type", "imatrix", "text", "imatrix_out"):
        if getattr(options, name) is not None and not exporter.blocks:
            option = name.replace("_", "-")
            raise RecipeError(f"--{option} is for gguf, and --to is {exporter.name}; leave it out")


def _check_text(options: Options) -> None:
    """RecipeError where there is a text and no use for it, or a use and no text."""
    text, measured = options.text, options.imatrix_out
    if measured is not None and text is None:
        raise RecipeError(
            f"--imatrix-out is {measured}, and importance is measured on a text; give --text FILE"
        )
    if text is not None and options.type is None and measured is None:
        raise RecipeError(
            f"--text is {text}; weights are rounded to --type by it, or importance is measured on"
            " it: give --type, or --imatrix-out FILE"
        )
    if text is not None and options.imatrix is not None:
        raise RecipeError(
            f"--text is {text}, and --imatrix {options.imatrix}; weights are rounded by one of the"
            " two: leave the other out"
        )


def _require_in_place(exporter: Exporter, out: str | Path | None) -> None:
    if exporter.in_place is None:
        those = ", ".join(name for name, row in EXPORTERS.items() if row.in_place is not None)
        raise RecipeError(f"--in-place is for {those}, and --to is {exporter.name}; leave it out")
    if out is not None:
        raise RecipeError(f"--in-place goes into the checkpoint's own folder, and --out is {out}")
