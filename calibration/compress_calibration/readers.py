"""Documents out of files and folders, streamed: a file is never in memory as a whole.

Every reader yields documents lazily. Without `rng` they come in file order; with it, files, row
groups and blocks of rows come in an order drawn from it, so that another seed starts elsewhere
even where a source is too large to shuffle as a whole.
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

CHUNK_CHARS = 1 << 20
# Of one document that is read as a whole: as many as read_lines takes for a line.
MOST_CHARS = 1 << 28
BATCH_ROWS = 1024


def permuted(count: int, rng: Random | None) -> list[int]:
    """0 .. count-1, in a drawn order when there is an `rng`.

    Only `Random.random` is used: Python promises that sequence across versions.
    """
    order = list(range(count))
    if rng is not None:
        for last in range(count - 1, 0, -1):
            other = int(rng.random() * (last + 1))
            order[last], order[other] = order[other], order[last]
    return order


def source_files(source: SourceConfig) -> list[Path]:
    """The files (for kind "dataset" the folders) a source names, patterns filled in, sorted.

    Raises DataError for a path that is not there and a pattern that matches nothing.
    """
    folders = source.kind == "dataset"
    found: list[Path] = []
    for pattern in source.paths:
        found += _matches(pattern, folders)
    return found


def _matches(pattern: str, folders: bool) -> list[Path]:
    path = usable(os.path.expanduser(pattern), "path", DataError)
    if path.exists():
        if path.is_dir() != folders:
            raise DataError(_wrong_kind(pattern, folders))
        return [_regular(path, folders)]
    names = glob.glob(str(path), recursive=True)
    found = [Path(name) for name in sorted(names) if os.path.isdir(name) == folders]
    matches = [_regular(path, folders) for path in found]
    if not matches:
        what = "folder" if folders else "file"
        raise DataError(f"{pattern}: there is no such {what} (looked from {Path.cwd()})")
    return matches


def _regular(path: Path, folders: bool) -> Path:
    """The path, of a file that can be read to an end; found here, before a run begins."""
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
    """Documents of text files, parted by the separator, white space at their ends removed.

    `piece` (characters) bounds memory: a longer document comes as several, cut at line ends.
    """
    files = source_files(source)
    for index in permuted(len(files), rng):
        yield from _file_documents(files[index], source.separator, piece)


def _file_documents(path: Path, separator: str, piece: int | None) -> Iterator[str]:
    buffer = ""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
            # Reading as much again as is left over keeps one huge document linear in time.
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
    """A document in pieces of at most about `piece` characters, ending at line ends or blanks.

    Always one piece or more; the last one is longer than `piece` / 2 where there are several,
    and the pieces joined are the document. `None`: one piece.
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
    """One document a line. Raises DataError with file and line for a malformed one."""
    files = source_files(source)
    for index in permuted(len(files), rng):
        yield from _lines(files[index], source.field, tokenizer)


def _lines(path: Path, field: str, tokenizer: Tokenizer) -> Iterator[str]:
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
    """One document a row, read by row group and batch, the one column needed only."""
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
        raise DataError(f"{path} cannot be read as parquet: {_line(error)}") from error


def read_dataset(source: SourceConfig, tokenizer: Tokenizer, rng: Random | None) -> Iterator[str]:
    """One document a row of folders that `Dataset.save_to_disk` wrote."""
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
        raise DataError(f"{path} is no saved data set ({_line(error)})") from error
    if isinstance(data, DatasetDict):
        return data[pick_split(list(data), split, str(path))]
    if split:
        raise DataError(f"{path} has no splits; take out split {split!r}")
    return data


def pick_split(names: Sequence[str], split: str, where: str) -> str:
    """The split asked for, or the only one. Raises DataError that says which exist."""
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


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
