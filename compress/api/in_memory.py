"""A model that a program holds, as a source: saved once, then a checkpoint like any other."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.checkpoint import disk, prepare_output, write_atomic
from compress.checkpoint.jsonfile import as_json, read_object
from compress.errors import CheckpointError, DataError, OutputError
from compress.runs.options import RunOptions

# A folder, a hub id, a model of transformers, or a pair of such a model and its tokenizer.
Model = Any
_SAVED = "saved.json"  # written last: what lies beside it is whole, and of which weights it is


@contextmanager
def checkpoint_of(model: Model | None) -> Iterator[Any]:
    """A path (or None) as it is; a model in memory as a temporary checkpoint.

    CheckpointError for what is none of them, DataError where its tokenizer cannot be found.
    """
    if not _is_in_memory(model):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="compress-model-") as folder:
        yield _save(model, Path(folder))


@contextmanager
def source_of_run(model: Model, out: str | Path, options: RunOptions) -> Iterator[Any]:
    """The same for a run into `out`: saved in OUT.source, which goes when OUT is there.

    A run that was stopped leaves it, so that one that goes on reads the very bytes that were
    hashed. OutputError where the model has become another by then.
    """
    if not _is_in_memory(model):
        yield model
        return
    output = prepare_output(out, overwrite=options.overwrite, resume=options.resume)
    kept = output.out.with_name(f"{output.out.name}.source")
    if options.resume:
        folder = _found(model, kept)
    else:
        _make_room(kept)
    try:
        if not options.resume:
            folder = _save(model, kept)
            write_atomic(kept / _SAVED, as_json({"model": folder.name, "weights": _digest(model)}))
        yield folder
    finally:
        # With nothing to go on with, or nothing left to do, nobody reads it again.
        if not (output.partial.exists() or output.publishing.exists()):
            disk.remove_tree(kept)


def _is_in_memory(model: Model) -> bool:
    if model is None or isinstance(model, str | Path):
        return False
    module, _ = _parts(model)
    if not (hasattr(module, "save_pretrained") and hasattr(module, "state_dict")):
        raise CheckpointError(
            f"model is a {type(module).__name__}; it is a folder, a hub id, a model of transformers"
            " or a pair (model, tokenizer)"
        )
    return True


def _parts(model: Model) -> tuple[Any, Any]:
    """The module, and the tokenizer or None."""
    return model if isinstance(model, tuple) and len(model) == 2 else (model, None)


def _make_room(kept: Path) -> None:
    """What an earlier run left goes; OutputError for anything else."""
    if kept.is_dir() and any(kept.iterdir()) and not (kept / _SAVED).is_file():
        raise OutputError(f"{kept} is not empty and no model of an earlier run; move it away")
    with disk.refusing(f"make {kept}"):
        if kept.exists():
            disk.remove_tree(kept)
        disk.mkdir(kept)


def _save(model: Model, inside: Path) -> Path:
    """Into a folder of the model's name, which reports show."""
    module, tokenizer = _parts(model)
    tokenizer = tokenizer or _tokenizer_of(module)
    folder = inside / (Path(_origin(module)).name or type(module).__name__)
    with disk.refusing(f"write {folder}", "make room, then call it again"):
        module.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
    return folder


def _origin(module: Any) -> str:
    """The folder or hub id that it was loaded from; empty where it was made here."""
    return str(getattr(module, "name_or_path", "") or "")


def _tokenizer_of(module: Any) -> Any:
    """That of the place the model came from; None where it came from none."""
    origin = _origin(module)
    if not origin:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(origin)
    except Exception as error:  # of its many kinds
        raise DataError(
            f"no tokenizer is found where the model came from, {origin}; give a pair"
            " (model, tokenizer)"
        ) from error


def _found(model: Model, kept: Path) -> Path:
    """What the run that was stopped had saved. OutputError where the model is not that one."""
    if not (kept / _SAVED).is_file():
        raise OutputError(f"nothing to resume: there is no whole model in {kept}; call it anew")
    saved = read_object(kept / _SAVED)
    if saved["weights"] != _digest(model):
        raise OutputError(
            f"the model is another than the one in {kept}, which the run began with; give that"
            " folder's, or remove it to start again"
        )
    return kept / str(saved["model"])


def _digest(model: Model) -> str:
    """Of config and weights, by name, dtype, shape and bytes."""
    import torch
    from xxhash import xxh3_128

    module, _ = _parts(model)
    found = xxh3_128(module.config.to_json_string().encode())
    for name, tensor in sorted(module.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(memoryview(data.view(torch.uint8).numpy()))
    return found.hexdigest()
