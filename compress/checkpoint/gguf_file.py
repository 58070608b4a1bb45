"""Which file a user means who names a folder with a GGUF file, or that file."""

import re
import struct
from pathlib import Path

from compress.checkpoint.index import has_weight_files
from compress.checkpoint.reading import reading
from compress.checkpoint.shards.gguf_header import SUFFIX
from compress.errors import CheckpointError

GGUF_FILE = "model.gguf"  # as we write it
# A key, the number of strings' type, and the string.
_IMPORTANCE = b"general.type" + struct.pack("<IQ", 8, len(b"imatrix")) + b"imatrix"
_FIRST = 4096  # bytes of a file, enough for a few keys
_PART = re.compile(r".*-(\d+)-of-(\d+)\.gguf")


def model_folder(path: Path) -> Path:
    """Where the small files of a model lie, tokenizer and so on: beside a GGUF file."""
    return path.parent if _is_file(path) else path


def place_of(path: Path) -> tuple[Path, str | None]:
    """The folder of a checkpoint, and the name of its GGUF file; None for safetensors, which count
    where both are in the folder that was named.

    A file of importance beside a model's is not meant. CheckpointError where there is no folder,
    where several files could be meant, and for one that is a part of others.
    """
    if _is_file(path):
        return path.parent, _whole(path)
    if path.exists() and not path.is_dir():
        what = "a file" if path.is_file() else "no folder"
        raise CheckpointError(f"{path} is {what}; give the folder with config.json and weights")
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; give the folder of a checkpoint")
    with reading(path):
        found = sorted(x for x in path.iterdir() if _is_file(x))
        others = has_weight_files(path)
    if not found or others:
        return path, None
    if len(found) > 1:
        found = [x for x in found if not _holds_importance(x)] or found
    if len(found) > 1 and not all(map(_part, found)):
        names = ", ".join(x.name for x in found[:4]) + (", ..." if len(found) > 4 else "")
        raise CheckpointError(f"{path} has {len(found)} GGUF files ({names}); give one of them")
    return path, _whole(found[0])


def _whole(path: Path) -> str:
    if _part(path):
        raise CheckpointError(
            f"{path} is one of several parts of a model; join them with llama.cpp's"
            " `llama-gguf-split --merge`"
        )
    return path.name


def _holds_importance(path: Path) -> bool:
    """Whether it is of llama-imatrix's kind, which it says among its first keys."""
    with reading(path), path.open("rb") as file:
        return _IMPORTANCE in file.read(_FIRST)


def _part(path: Path) -> bool:
    found = _PART.fullmatch(path.name)
    return found is not None and int(found[2]) > 1


def _is_file(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()
