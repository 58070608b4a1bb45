"""Standard input, output and error, so that none of them ends a command by itself."""

import codecs
import io
import json
import os
import sys
from typing import TextIO

from compress.errors import DataError, OutputError

_ESCAPED = "compress-escaped"
Bytes = bytes | bytearray | memoryview


class InputFile(io.FileIO):
    """Standard input. What cannot be read is said in one line."""

    def readinto(self, buffer: bytearray | memoryview, /) -> int | None:  # type: ignore[override]
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise DataError(
                f"cannot read standard input: {error.strerror}; direct a text to it, then run it"
                " again"
            ) from None


class ResultFile(io.FileIO):
    """Standard output. What it does not take is said in one line; a reader that left is not an
    error, and stays the BrokenPipeError that it is."""

    def write(self, data: Bytes, /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(
                f"cannot write to standard output: {error.strerror}; direct it elsewhere, then run"
                " it again"
            ) from None


class NotesFile(io.FileIO):
    """Standard error. Progress and notes that nobody can read are lost; the work goes on."""

    def write(self, data: Bytes, /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return len(data)


def open_streams() -> None:
    """Put the three in place of Python's, which are None where the caller closed one.

    A closed one becomes the null device: else the first file that is opened takes its number, and
    what a library writes to number 2 goes into a checkpoint.
    """
    codecs.register_error(_ESCAPED, _escaped)
    for number in range(3):
        if _is_closed(number):
            # The lowest free number is taken, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = io.TextIOWrapper(
        io.BufferedReader(InputFile(0, closefd=False)),
        encoding="utf-8" if sys.stdin is None else sys.stdin.encoding,
        errors="strict" if sys.stdin is None else sys.stdin.errors,
    )
    sys.stdout = _text(ResultFile(1, "w", closefd=False), sys.stdout, _ESCAPED)
    sys.stderr = _text(NotesFile(2, "w", closefd=False), sys.stderr, "backslashreplace")


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def _text(file: io.FileIO, before: TextIO | None, errors: str) -> io.TextIOWrapper:
    """Text in the encoding that Python chose for the stream `before`."""
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding="utf-8" if before is None else before.encoding,
        errors=errors,
        line_buffering=errors != _ESCAPED or file.isatty(),
        write_through=bool(getattr(before, "write_through", False)),
    )


def _escaped(error: UnicodeError) -> tuple[str, int]:
    r"""Characters that the encoding does not have, among them bytes of file names that are no text,
    as \uXXXX: what they are in JSON too."""
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
