"""A model by its Hugging Face hub id: fetched once, then found in the local cache."""

import os
import re
from pathlib import Path

from compress.checkpoint.index import pickle_message
from compress.checkpoint.regular import usable
from compress.checkpoint.sidefiles import FOLDER_OF_OUTLIERS
from compress.errors import CheckpointError

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_PROBE_SECONDS = 5.0
_WANTED = (
    *("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "tokenizer*"),
    *("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"),
)
# Subfolders hold other formats; consolidated* is a second copy of the weights.
_UNWANTED = ("*/*", "consolidated*")
_OF_OUTLIERS = f"{FOLDER_OF_OUTLIERS}/*.safetensors"


def resolve_model(path_or_id: str | Path) -> Path:
    """Folder of a model given as a folder, as a GGUF file, which is given back, or as a hub id
    (`org/name`).

    What exists wins. Raises CheckpointError when neither exists, within seconds when the
    hub cannot be reached.
    """
    folder = usable(path_or_id, "model", CheckpointError)
    if folder.exists():
        return folder
    if not _ID.fullmatch(str(path_or_id)):
        raise CheckpointError(f"{folder} does not exist; give the folder of a checkpoint")
    return _fetch(str(path_or_id))


def _fetch(model_id: str) -> Path:
    names, reason = _look(model_id)
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            model_id,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
            local_files_only=reason is not None,
        )
        if any(name.startswith(f"{FOLDER_OF_OUTLIERS}/") for name in names):
            snapshot_download(model_id, allow_patterns=[_OF_OUTLIERS])
        return Path(folder)
    except Exception as error:  # types differ between versions of the hub's HTTP client
        why = reason or _one_line(error)
        raise CheckpointError(
            f"{model_id} is neither a folder here nor in the local cache, and the Hugging Face hub"
            f" did not give it ({why}); check the name, or give the folder of a checkpoint"
        ) from error


def _look(model_id: str) -> tuple[list[str], str | None]:
    """Names of the model's files, or why the hub cannot be asked for them now."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [], "HF_HUB_OFFLINE is set"
    try:
        from huggingface_hub import HfApi

        siblings = HfApi().model_info(model_id, timeout=_PROBE_SECONDS).siblings or []
    except Exception as error:  # types differ between versions of the hub's HTTP client
        return [], _one_line(error)
    names = [sibling.rfilename for sibling in siblings]
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        raise CheckpointError(pickle_message(model_id, pickles[0]))
    return names, None


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
