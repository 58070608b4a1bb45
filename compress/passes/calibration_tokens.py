"""Calibration tokens of a run: built once, kept in OUT.partial for a resumed run to see again."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from compress.blocks.author import Author
from compress.blocks.sample import OwnText
from compress.checkpoint.output.folder import write_atomic
from compress.errors import OutputError
from compress.events import Progress, silent
from compress.passes.journal import CALIBRATION, Journal
from compress.text.tokenizer import load_tokenizer
from compress_calibration.config import CalibrationConfig
from compress_calibration.dataset import TokenSet, build, digest

FILE = "calibration.safetensors"


def prepare(
    config: CalibrationConfig, author: Author, folder: Path, progress: Progress = silent
) -> dict[str, Any]:
    """Build the calibration set, store it and return its summary as plain data.

    author: the source model, which writes text of its own where the config asks for it.
    """
    tokens = built(config, author, progress)
    stored = {"ids": tokens.ids}
    if tokens.mask is not None:
        stored["mask"] = tokens.mask
    write_atomic(folder / FILE, save(stored))
    return tokens.summary.to_json()


def built(
    config: CalibrationConfig,
    author: Author,
    progress: Progress = silent,
    *,
    fewest: int | None = None,
) -> TokenSet:
    """The rows that a config asks for. fewest: rows that do, where the texts hold no more; None for
    all."""
    only_self = all(source.kind == "self" for source in config.sources)
    weights = author.weights
    tokenizer = None if only_self else load_tokenizer(weights.checkpoint.small)

    def sample(count: int, length: int) -> Tensor:
        return author.write(OwnText(count, length, config.seed), "calibrate", progress)

    vocab = weights.spec.vocab
    return build(config, tokenizer, generate=sample, vocab=vocab, fewest=fewest)


def of_run(
    config: CalibrationConfig,
    author: Author,
    folder: Path,
    journal: Journal,
    progress: Progress = silent,
) -> dict[str, Any]:
    """As `prepare`; where an earlier pass of the run has drawn them, what it has recorded."""
    for part in journal.passes.values():
        if CALIBRATION in part.units:
            return dict(part.units[CALIBRATION])
    return prepare(config, author, folder, progress)


def reload(folder: Path, sha256: str, file: str = FILE) -> tuple[Tensor, Tensor | None]:
    """ids int64 [samples, length] and mask, as `prepare` stored them.

    sha256: of the summary. OutputError when the file is gone or holds other tokens.
    """
    path = folder / file
    try:
        stored = load(path.read_bytes())
    except OSError as error:
        raise OutputError(
            f"cannot read {path}: {error.strerror or error}; remove {folder} and start again"
        ) from error
    except Exception as error:  # safetensors' own, json's and struct's, by what is broken
        raise OutputError(f"{path} is broken; remove {folder} and start again") from error
    ids, mask = stored.get("ids"), stored.get("mask")
    mask = None if mask is None else mask.to(torch.bool)
    if ids is None or digest(ids, mask) != sha256:
        raise OutputError(
            f"{path} does not hold the tokens that the run began with; remove {folder} and start"
            " again"
        )
    return ids, mask
