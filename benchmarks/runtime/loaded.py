"""The checkpoints that the engine's benchmarks serve."""

from dataclasses import replace
from pathlib import Path

from benchmarks.models import SHAPES, make
from benchmarks.processes import REPO


def checkpoint(name: str, folder: Path, blocks: int | None = None) -> Path:
    """An example's folder, or `folder`, where a model of that shape is made with random weights."""
    if name not in SHAPES:
        return REPO / "examples" / name
    shape = SHAPES[name]
    make(folder, replace(shape, blocks=blocks or shape.blocks), tokenizer=False)
    return folder
