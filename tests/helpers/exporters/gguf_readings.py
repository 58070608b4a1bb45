"""GGUF files with the small files of their model beside them, opened as checkpoints."""

import shutil
from pathlib import Path
from typing import Any

from compress.checkpoint import Checkpoint
from compress.formats import Weights, open_weights
from helpers.exporters.gguf_files import written


def with_small_files(source: Path, folder: Path) -> Path:
    """The folder, with what lies beside the weights of a model."""
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
    return folder


def opened(source: Weights, tmp_path: Path, **options: Any) -> Weights:
    """A model written as GGUF, dense and in fp32 unless options say otherwise, and opened."""
    _, path = written(source, tmp_path / "gguf", **options)
    return open_weights(Checkpoint.open(with_small_files(source.checkpoint.path, path.parent)))
