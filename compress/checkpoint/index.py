"""Which files of a folder hold the weights, and which tensor each of them must hold."""

import os
import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from compress.checkpoint.jsonfile import read_object
from compress.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r".*-\d+-of-\d+\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def has_weight_files(folder: Path) -> bool:
    """Whether safetensors in a folder are called as those of a model; others may lie there, too."""
    names = [path.name for path in folder.iterdir()]
    return INDEX in names or any(x == SINGLE or _SHARD.fullmatch(x) for x in names)


def weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Weight files of a folder in order, and the index (tensor -> file) when there is one.

    Raises CheckpointError when there are none, when which ones is ambiguous, or when the index
    names something that is not a file of the folder.
    """
    if (folder / INDEX).exists():
        weight_map = _read_index(folder)
        files = sorted(set(weight_map.values()))
        if (folder / SINGLE).exists() and SINGLE not in files:
            raise CheckpointError(
                f"{folder} has both {SINGLE} and {INDEX}, which does not name it: remove the one"
                " that is out of date"
            )
        return files, weight_map
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    shards = [name for name in found if _SHARD.fullmatch(name)]
    if SINGLE in found and not shards:
        _require_file(folder, SINGLE, folder / SINGLE)
        return [SINGLE], None
    raise CheckpointError(_no_weights(folder, found))


def _no_weights(folder: Path, found: list[str]) -> str:
    if len(found) == 1 and not _SHARD.fullmatch(found[0]):
        return f"{folder} has {found[0]} but no {SINGLE}; rename the file to {SINGLE}"
    if found:
        names = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        return (
            f"{folder} has {len(found)} safetensors files ({names}) but no {INDEX}, so it is not"
            " known which belong together; copy the index from where the checkpoint came from"
        )
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if pickles:
        return pickle_message(str(folder), pickles[0])
    return f"{folder} has no weights: {SINGLE} or {INDEX} with its shards is expected"


def pickle_message(model: str, file: str) -> str:
    """Refusal of a checkpoint that only has pickled weights, with the command that converts it."""
    target = Path(model).name + "-safetensors"
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T;"
        f" M.from_pretrained({model!r}, dtype='auto').save_pretrained({target!r});"
        f" T.from_pretrained({model!r}).save_pretrained({target!r})"
    )
    return (
        f"{model} has its weights only as a pickle ({file}), which can run code when it is opened;"
        f' if you trust it, convert it with: python -c "{code}"'
    )


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    weight_map: Any = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map (tensor name to file name)")
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{path} maps tensor {tensor!r} to {file!r}, not a file name")
    for file in sorted(set(weight_map.values())):
        _check_inside(folder, file)
        _require_file(folder, file, path)
    return weight_map


def _check_inside(folder: Path, file: str) -> None:
    """A file named by the index must lie below the folder, its own links aside.

    The Hugging Face cache links each file of a snapshot to a blob elsewhere, so the last step may
    be a link; the steps before it may not lead out.
    """
    windows, posix = PureWindowsPath(file), PurePosixPath(file)
    plain = "\\" not in file and "\0" not in file and not windows.drive and not posix.is_absolute()
    plain = plain and bool(posix.parts) and ".." not in posix.parts
    plain = plain and file.endswith(".safetensors")
    if plain:
        # Not Path.resolve: it raises for links in a circle.
        parent = Path(os.path.realpath((folder / file).parent))
        plain = parent.is_relative_to(os.path.realpath(folder))
    if not plain:
        raise CheckpointError(
            f"{folder / INDEX} names {file!r}, which is not a .safetensors file inside the folder"
        )


def _require_file(folder: Path, file: str, source: Path) -> None:
    # Not Path.is_file: it raises for names that are too long.
    if not os.path.isfile(folder / file):
        raise CheckpointError(
            f"{folder / file} is missing though {source.name} names it; download it again"
            if source.name == INDEX
            else f"{folder / file} is not a file"
        )
