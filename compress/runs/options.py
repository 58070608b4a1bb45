"""How a run goes, whatever its recipe says."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Where a run computes, and what it does with a folder that is there already.

    device: "cpu", "cuda" or "cuda:N". dtype: arithmetic of calibrated passes, "bf16", "fp16" or
    "fp32"; None chooses. resume: go on with a killed run of the same recipe, source and
    environment; the result is byte for byte what it would have been. overwrite: replace the result
    of an earlier run. cache: keep text that the model writes, and the evaluation of the source, in
    the user's cache folder, and take what is kept there; a path keeps them in that folder instead.
    """

    device: str = "cpu"
    dtype: str | None = None
    resume: bool = False
    overwrite: bool = False
    cache: bool | Path = True
