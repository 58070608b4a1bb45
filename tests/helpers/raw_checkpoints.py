"""Checkpoint folders made byte by byte, so that they can lie."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"


def raw_file(path: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file with that header (bytes as they are, else as JSON) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def folder_of(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A single-file checkpoint written by the safetensors library."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    """A sharded checkpoint with a true index; shards: file name -> tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for file, tensors in shards.items():
        (folder / file).parent.mkdir(exist_ok=True)
        save_file(tensors, folder / file)
    write_index(folder, {name: file for file, tensors in shards.items() for name in tensors})
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    content = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(content))
