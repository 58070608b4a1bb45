"""Which files of a checkpoint folder are carried over beside the weights.

Whatever is small and not weights goes along, so that no tokenizer or processor file is forgotten.
README.md is not carried over: it describes the source, and the output gets its own card.
"""

from collections.abc import Collection
from pathlib import Path

from compress.checkpoint.disk import TEMPORARY
from compress.checkpoint.in_memory import SOURCE

_LARGEST = 256 << 20  # a tokenizer.json of 33 MB exists; nothing beside weights is larger than this
_REPLACED = ("config.json", "model.safetensors.index.json", "README.md")
_OTHER_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"),
    *(".onnx_data", ".ot", ".tflite", ".npy", ".npz", ".pkl", ".pickle", ".joblib"),
)
_BESIDE_A_GRAPH = ".onnx."  # as in model.onnx.data: weights and report of a graph
# What is read of a model beside config.json and weights, by us and by transformers' tokenizers.
# Known by name, as a link that leads outside the folder is read too, and not carried over.
_PARSED = (
    *("generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
FOLDER_OF_OUTLIERS = "compress_model"  # of a result: columns that stay in 16 bit
# What a run, or an export of a rounded file, itself makes in the folder of its result.
RUNS_OWN = (
    *("journal.json", "hidden.0", "hidden.1", "blocks.rounded", "evaluation", "outliers"),
    *("working", "loading", "rounding", SOURCE),
    *("report", "recipe.yaml", FOLDER_OF_OUTLIERS),
)
RUN_MAKES = "a run makes a file of this name"
_RUNS_SUFFIXES = (".partial", TEMPORARY)


def carried(folder: Path, weights: Collection[str]) -> list[Path]:
    """Files to copy unchanged, sorted by name."""
    return [p for p in _entries(folder, weights) if _why_not_copied(p) is None]


def parsed(folder: Path) -> list[str]:
    """Names of what is there of the files that are read and not only copied."""
    return [name for name in _PARSED if (folder / name).is_file()]


def skipped(folder: Path, weights: Collection[str]) -> dict[str, str]:
    """What is left behind, sorted by name, each with the reason; folders end in a slash.

    The reason is empty where the kind of file says it: weights of other formats, hidden files,
    folders.
    """
    reasons = [(p, _why_not_copied(p)) for p in _entries(folder, weights)]
    return {_shown(p): why for p, why in reasons if why is not None}


def _shown(path: Path) -> str:
    name = path.name if _is_text(path.name) else ascii(path.name)[1:-1]
    return f"{name}/" if path.is_dir() else name


def _is_text(name: str) -> bool:
    """Whether a name is UTF-8: what the system cannot decode is a lone surrogate in Python."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _entries(folder: Path, weights: Collection[str]) -> list[Path]:
    """What the folder holds besides what is read or replaced."""
    used = {*_REPLACED, *weights, *(name.partition("/")[0] for name in weights)}
    return [p for p in sorted(folder.iterdir()) if p.name not in used]


def _why_not_copied(path: Path) -> str | None:
    """Why a file stays behind, None when it goes along."""
    if path.name in RUNS_OWN or path.name.endswith(_RUNS_SUFFIXES):
        return RUN_MAKES
    unwanted = path.name.startswith(".") or path.suffix.lower() in _OTHER_WEIGHTS
    unwanted = unwanted or _BESIDE_A_GRAPH in path.name.lower()
    if unwanted or path.name.endswith(".index.json") or path.is_dir():
        return ""
    if not _is_text(path.name):
        return "its name is not UTF-8"
    if path.is_symlink() and not path.exists():
        return "a link that leads nowhere"
    if path.is_symlink() and not _belongs(path):
        return "a link that leads outside the folder"
    if not path.is_file():
        return "not a file"
    return "larger than 256 MiB" if path.stat().st_size > _LARGEST else None


def _belongs(link: Path) -> bool:
    """Whether a link stays in its folder, or in the Hugging Face cache leads to a blob of its
    repository: REPO/snapshots/REVISION/name -> REPO/blobs/hash."""
    folder, target = link.parent.resolve(), link.resolve()
    if target.is_relative_to(folder):
        return True
    return folder.parent.name == "snapshots" and target.parent == folder.parent.parent / "blobs"
