"""Reads documents from files and folders as streams: a file is never in memory as a whole.

Every reader yields its documents lazily. Without `rng` they come in file order. With it the order
of files, row groups and blocks of rows is drawn from `rng`, so that another seed starts at another
place even in a source that is too large to shuffle as a whole.
"""

import glob
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from compress.checkpoint.regular import open_regular, read_lines, require_regular, usable
from compress.errors import DataError, DependencyError
from compress.text.tokenizer import Tokenizer
from compress_calibration.config import SourceConfig
from compress_calibration.rows import pick_field, row_text

CHUNK_CHARS = 1 << 20  # characters read at a time, at least
# Characters of one document, which is held in memory until its end is found. `read_lines` allows a
# line as many bytes.
MOST_CHARS = 1 << 28
BATCH_ROWS = 1024  # rows of a parquet file or data set in memory at a time


def permuted(count: int, rng: Random | None) -> list[int]:
    """The numbers 0 .. count-1, in an order drawn from `rng` where there is one.

    Calls only `Random.random`: Python promises the same sequence of it in all versions.
    """
    order = list(range(count))
    if rng is not None:
        for last in range(count - 1, 0, -1):
            other = int(rng.random() * (last + 1))
            order[last], order[other] = order[other], order[last]
    return order


def source_files(source: SourceConfig) -> list[Path]:
    """The files that a source names, or the folders for kind "dataset".

    A pattern stands for all that it matches, sorted. Raises DataError for a path that does not
    exist and for a pattern that matches nothing.
    """
    folders = source.kind == "dataset"
    found: list[Path] = []
    for pattern in source.paths:
        found += _matches(pattern, folders)
    return found


def _matches(pattern: str, folders: bool) -> list[Path]:
    """The path itself where it exists, else what it matches as a pattern. folders: look for folders
    and pass over files, else the other way round."""
    path = usable(os.path.expanduser(pattern), "path", DataError)
    if path.exists():
        if path.is_dir() != folders:
            raise DataError(_wrong_kind(pattern, folders))
        return [_regular(path, folders)]
    names = glob.glob(str(path), recursive=True)
    found = [Path(name) for name in sorted(names) if os.path.isdir(name) == folders]
    matches = [_regular(match, folders) for match in found]
    if not matches:
        what = "folder" if folders else "file"
        raise DataError(f"{pattern}: there is no such {what} (looked from {Path.cwd()})")
    return matches


def _regular(path: Path, folders: bool) -> Path:
    """The path unchanged. DataError for a file that is not regular, such as a pipe, which may have
    no end: so a run refuses it before it begins."""
    try:
        if not folders:
            require_regular(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return path


def _wrong_kind(pattern: str, folders: bool) -> str:
    if folders:
        return f"{pattern} is a file; a source of kind 'dataset' takes a folder"
    return f"{pattern} is a folder; name its files, for example '{pattern.rstrip('/')}/*.txt'"


def read_text(source: SourceConfig, piece: int | None, rng: Random | None) -> Iterator[str]:
    """Documents of text files, split at the separator and stripped of white space at both ends.

    `piece` (characters) bounds memory: `cut` makes several documents of a longer one.
    """
    files = source_files(source)
    for index in permuted(len(files), rng):
        yield from _file_documents(files[index], source.separator, piece)


def _file_documents(path: Path, separator: str, piece: int | None) -> Iterator[str]:
    buffer = ""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
            # Every split searches the whole buffer. Reading as much as it already holds doubles it,
            # so one huge document takes linear time.
            while chunk := file.read(max(CHUNK_CHARS, len(buffer))):
                *whole, buffer = (buffer + chunk).split(separator)
                for document in whole:
                    yield from _stripped(document, piece)
                *pieces, buffer = cut(buffer, piece)
                yield from (text.strip() for text in pieces if text.strip())
                if len(buffer) > MOST_CHARS:
                    raise DataError(_too_long(path, separator))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"{path} is not UTF-8 text (byte 0x{byte:02x}: {error.reason}); convert it to UTF-8"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    yield from _stripped(buffer, piece)


def _too_long(path: Path, separator: str) -> str:
    return (
        f"{path} holds a document of more than {MOST_CHARS:,} characters;"
        f" part it by {separator!r}, or take a shorter file"
    )


def _stripped(document: str, piece: int | None) -> Iterator[str]:
    yield from (text.strip() for text in cut(document, piece) if text.strip())


def cut(document: str, piece: int | None) -> list[str]:
    """Cut a document into pieces whose concatenation is the document.

    A piece has `piece` / 2 to `piece` characters and ends after a line end where it can, else after
    a blank, else anywhere. The last piece has at most 1.5 * `piece` characters, and more than
    `piece` / 2 unless it is the only one. piece: None for one piece.
    """
    pieces: list[str] = []
    start = 0
    while piece is not None and len(document) - start > piece + piece // 2:
        middle, last = start + piece // 2, start + piece
        end = document.rfind("\n", middle, last)
        if end < 0:
            end = document.rfind(" ", middle, last)
        end = last if end < 0 else end + 1
        pieces.append(document[start:end])
        start = end
    return [*pieces, document[start:]]


def read_jsonl(source: SourceConfig, tokenizer: Tokenizer, rng: Random | None) -> Iterator[str]:
    """One document a line. Raises DataError with file and line for a malformed line."""
    files = source_files(source)
    for index in permuted(len(files), rng):
        yield from _jsonl_rows(files[index], source.field, tokenizer)


def _jsonl_rows(path: Path, field: str, tokenizer: Tokenizer) -> Iterator[str]:
    try:
        for number, line in enumerate(read_lines(path), start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield row_text(_json_object(line, where), field, where, tokenizer)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} holds a {type(row).__name__}; a line must be a JSON object")
    return row


def read_parquet(source: SourceConfig, tokenizer: Tokenizer, rng: Random | None) -> Iterator[str]:
    """One document a row. Reads a batch of rows at a time, and only the column that is needed."""
    files = source_files(source)
    for index in permuted(len(files), rng):
        yield from _parquet_rows(files[index], source.field, tokenizer, rng)


def _parquet_rows(
    path: Path, field: str, tokenizer: Tokenizer, rng: Random | None
) -> Iterator[str]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise _needs_data_extra("parquet") from error
    try:
        with open_regular(path) as opened, ParquetFile(opened) as file:
            name = pick_field(file.schema_arrow.names, field, str(path))
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            for group in permuted(len(sizes), rng):
                first = sum(sizes[:group])
                batches = file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[name])
                rows = (row for batch in batches for row in batch.to_pylist())
                for number, row in enumerate(rows, start=first):
                    yield row_text(row, name, f"{path} row {number}", tokenizer)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {_one_line(error)}") from error


def read_dataset(source: SourceConfig, tokenizer: Tokenizer, rng: Random | None) -> Iterator[str]:
    """One document a row, from folders that `Dataset.save_to_disk` wrote."""
    for path in source_files(source):
        data = _load_folder(path, source.split)
        name = pick_field(data.column_names, source.field, str(path))
        data = data.select_columns([name])
        blocks = range(0, len(data), BATCH_ROWS)
        for block in permuted(len(blocks), rng):
            start = blocks[block]
            values = data[start : start + BATCH_ROWS][name]
            for number, value in enumerate(values, start=start):
                yield row_text({name: value}, name, f"{path} row {number}", tokenizer)


def _load_folder(path: Path, split: str) -> Any:
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError as error:
        raise _needs_data_extra("dataset") from error
    try:
        data = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no saved data set ({_one_line(error)})") from error
    if isinstance(data, DatasetDict):
        return data[pick_split(list(data), split, str(path))]
    if split:
        raise DataError(f"{path} has no splits; take out split {split!r}")
    return data


def pick_split(names: Sequence[str], split: str, where: str) -> str:
    """The split that is asked for, or the only one. Else DataError, which lists the splits."""
    known = ", ".join(names)
    if split and split not in names:
        raise DataError(f"{where} has no split {split!r}; its splits: {known}")
    if not split and len(names) != 1:
        raise DataError(f"{where} has several splits; choose one with split: ({known})")
    return split or names[0]


def _needs_data_extra(kind: str) -> DependencyError:
    return DependencyError(
        f"sources of kind {kind!r} need an extra: pip install 'compress-model[data]'"
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
