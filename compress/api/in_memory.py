"""A model that a program holds, as a source: saved once, then a checkpoint like any other."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from compress.checkpoint import (
    Output,
    claimed,
    disk,
    lent,
    locked,
    prepare_output,
    write_atomic,
)
from compress.checkpoint.in_memory import MARK, is_alone, remove_source
from compress.checkpoint.jsonfile import as_json, read_object
from compress.errors import CheckpointError, DataError, OutputError
from compress.runs.options import RunOptions

# A folder, a hub id, a model of transformers, or a pair of such a model and its tokenizer.
Model = Any


@contextmanager
def checkpoint_of(model: Model | None) -> Iterator[Any]:
    """A path (or None) as it is; a model in memory as a temporary checkpoint.

    CheckpointError for what is none of them, DataError where its tokenizer cannot be found.
    """
    if not _is_in_memory(model):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="compress-model-") as folder:
        yield _saved(model, Path(folder))


@contextmanager
def source_of_run(model: Model, out: str | Path, options: RunOptions) -> Iterator[Any]:
    """The same for a run into `out`: saved in OUT.partial, which becomes OUT without it.

    A run that was stopped leaves it, so that one that goes on reads the very bytes that were
    hashed. The folder is held from here on, or another process would take what is saved for a left
    one's. OutputError where the model has become another by then.
    """
    if not _is_in_memory(model):
        yield model
        return
    output = prepare_output(out, overwrite=options.overwrite, resume=options.resume)
    if output.state == "publish":  # the result is whole, and its source may be gone
        with checkpoint_of(model) as source:
            yield source
        return
    with claimed(output), lent(output.partial):
        try:
            yield _found(model, output) if options.resume else _kept(model, output)
        finally:
            _clear(output.partial)


def _kept(model: Model, output: Output) -> Path:
    """Saved before the run begins."""
    with disk.refusing(f"make {output.source}"):
        disk.mkdir(output.source)
    return _saved(model, output.source, _digest(model))


def _clear(partial: Path) -> None:
    """With nothing to go on with nobody reads it again."""
    if is_alone(partial):
        # Locked already, but for a folder that another process made since this one's became OUT.
        with suppress(OutputError), locked(partial), disk.refusing(f"clear {partial}"):
            remove_source(partial)
            disk.rmdir(partial)


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


def _saved(model: Model, inside: Path, weights: str | None = None) -> Path:
    """Into a folder of the model's name, which reports show. weights: their digest, said when it is
    whole."""
    module, tokenizer = _parts(model)
    folder = inside / (Path(_origin(module)).name or type(module).__name__)
    write_atomic(inside / MARK, as_json({"model": folder.name, "weights": None}))
    tokenizer = tokenizer or _tokenizer_of(module)
    with disk.refusing(f"write {folder}", "make room, then call it again"):
        module.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        write_atomic(inside / MARK, as_json({"model": folder.name, "weights": weights}))
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


def _found(model: Model, output: Output) -> Path:
    """What the run that was stopped had saved. OutputError where the model is not that one."""
    mark = output.source / MARK
    saved = read_object(mark) if mark.is_file() else {}
    if saved.get("weights") is None:
        raise OutputError(
            f"nothing to resume: there is no whole model in {output.source}; remove"
            f" {output.partial} and call it anew"
        )
    if saved["weights"] != _digest(model):
        raise OutputError(
            f"the model is another than the one in {output.source}, which the run began with; give"
            f" that folder's, or remove {output.partial} to start again"
        )
    return output.source / str(saved["model"])


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
