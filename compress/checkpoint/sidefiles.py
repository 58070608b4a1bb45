"""Which files of a checkpoint folder are carried over beside the weights.

Whatever is small and not weights goes along, so that no tokenizer or processor file is forgotten.
README.md is not carried over: it describes the source, and the output gets its own card.
"""

from collections.abc import Collection
from pathlib import Path

_LARGEST = 256 << 20  # a tokenizer.json of 33 MB exists; nothing beside weights is larger than this
_REPLACED = ("config.json", "model.safetensors.index.json", "README.md")
_OTHER_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"),
    *(".onnx_data", ".ot", ".tflite", ".npz"),
)


def carried(folder: Path, weights: Collection[str]) -> list[Path]:
    """Files to copy unchanged, sorted by name."""
    return [p for p in sorted(folder.iterdir()) if _kind(p, weights) == "carried"]


def skipped(folder: Path, weights: Collection[str]) -> list[str]:
    """What is left behind, sorted by name; folders end in a slash."""
    entries = [p for p in sorted(folder.iterdir()) if _kind(p, weights) == "skipped"]
    return [p.name + "/" if p.is_dir() else p.name for p in entries]


def _kind(path: Path, weights: Collection[str]) -> str:
    """ "used" (read or replaced), "carried" or "skipped"."""
    if path.name in weights or path.name in _REPLACED:
        return "used"
    if path.is_dir():
        holds_weights = any(name.startswith(path.name + "/") for name in weights)
        return "used" if holds_weights else "skipped"
    unwanted = path.name.startswith(".") or path.suffix in _OTHER_WEIGHTS
    unwanted = unwanted or path.name.endswith(".index.json")
    if unwanted or not path.is_file() or path.stat().st_size > _LARGEST:
        return "skipped"
    return "carried"
