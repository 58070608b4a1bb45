"""How a run goes, whatever its recipe says."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.sharing.trackers import Hook


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Where a run computes, and what it does with a folder that is there already.

    device: "cpu", "cuda", "cuda:N", or "auto", a GPU that gives the CPU's results, else the CPU.
    dtype: arithmetic of calibrated passes, "bf16", "fp16" or
    "fp32"; None chooses. resume: go on with a killed run of the same recipe, source and
    environment; the result is byte for byte what it would have been. overwrite: replace the result
    of an earlier run. cache: keep text that the model writes, and the evaluation of the source, in
    the user's cache folder, and take what is kept there; a path keeps them in that folder instead.
    push: a repository of the Hugging Face hub that the result goes to, too.
    track: who gets the report's numbers, by names ("mlflow", "wandb", "tensorboard") or as
    functions of compress.sharing.metrics.RunMetrics.
    """

    device: str = "auto"
    dtype: str | None = None
    resume: bool = False
    overwrite: bool = False
    cache: bool | Path = True
    push: str | None = None
    track: Sequence[str | Hook] = ()
