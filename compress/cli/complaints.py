"""What a command line says of what ended it: one line, of a length that can be read."""

import errno
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

from compress.errors import CompressError

# Characters of a word, as a path or a quoted value, and of a whole line. Longer ones lose their
# middle: the place stands at the front of a message, the remedy at its end.
WORD, LINE = 200, 2000
_WORD = re.compile(rf"\S{{{WORD + 1},}}")
_OURS = frozenset({"compress", "compress_kernels", "compress_calibration", "compress_exporters"})
_INSTALLED_AS: Mapping[str, str] = MappingProxyType({"yaml": "pyyaml", "google": "protobuf"})
# What the system can lack, or refuse for reasons that are not ours, and what helps.
_REMEDIES: Mapping[int, str] = MappingProxyType(
    {
        errno.ENOSPC: "make room, then run it again",
        errno.EDQUOT: "make room, then run it again",
        errno.EMFILE: "allow more open files (`ulimit -n 1024`), then run it again",
        errno.ENFILE: "close other programs, then run it again",
        errno.ENOMEM: "free memory, or allow more of it (`ulimit -v unlimited`), then run it again",
        errno.EAGAIN: "allow more processes (`ulimit -u`), then run it again",
        errno.EIO: "look after the disk, then run it again",
        errno.ESTALE: "mount the file system again, then run it again",
        errno.ENAMETOOLONG: "give it a shorter name",
        errno.ELOOP: "mend the links",
        errno.EACCES: "allow it to be used, or choose another place",
        errno.EPERM: "allow it to be used, or choose another place",
        errno.EROFS: "choose a place that can be written to",
    }
)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Of these, what says nothing of the file that was to be read.
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE)
# The same in words: of torch, which raises RuntimeError, and of the loader of shared libraries.
_LACKS = (
    ("can't allocate memory", errno.ENOMEM),
    ("annot allocate memory", errno.ENOMEM),
    ("not enough memory", errno.ENOMEM),
    ("out of memory", errno.ENOMEM),
    ("bad_alloc", errno.ENOMEM),
    ("failed to map segment", errno.ENOMEM),
    ("Too many open files", errno.EMFILE),
    ("can't start new thread", errno.EAGAIN),
)


def shortened(message: str) -> str:
    """One printable line: long words and long lines lose their middle."""
    line = " ".join(message.split("\n"))
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    line = _WORD.sub(lambda found: _cut(found[0], WORD), line)
    return _cut(line, LINE)


def _cut(text: str, most: int) -> str:
    tail = most // 3
    return text if len(text) <= most else f"{text[: most - tail - 3]}...{text[-tail:]}"


def of_environment(error: BaseException) -> str | None:
    """The line for an error that the machine or its packages caused; None for a fault of ours."""
    number = _lack(error)
    if number is not None:
        name = getattr(error, "filename", None)
        of = f" ({os.fsdecode(name)})" if isinstance(name, str | bytes) else ""
        doing = "cannot write" if number in _FULL else "the system refuses"
        return f"{doing}: {os.strerror(number)}{of}; {_REMEDIES[number]}"
    package = _importing(error)
    if package is None:
        return None
    return (
        f"the package {package} cannot be loaded ({_said(error)});"
        f" pip install --force-reinstall {_INSTALLED_AS.get(package, package)}"
    )


def of_user(error: CompressError) -> str:
    """The line for a mistake of the user, with what helps where it was the system's refusal."""
    said, cause = str(error), error.__cause__ or error.__context__
    number = cause.errno if isinstance(cause, OSError) else None
    if number is None or number not in _SCARCE or not said.endswith(os.strerror(number)):
        return said
    return f"{said}; {_REMEDIES[number]}"


def _lack(error: BaseException) -> int | None:
    """The number of what the system lacks, where that is what the error says."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _REMEDIES else None
    if isinstance(error, RuntimeError | ImportError | OSError):
        return next((number for words, number in _LACKS if words in str(error)), None)
    return None


def _importing(error: BaseException) -> str | None:
    """The foreign package whose import raised the error."""
    missing = error.name if isinstance(error, ImportError) else None
    found = _module_at_top(error.__traceback__) or missing or _unparsed(error) or ""
    package = found.partition(".")[0]
    return None if package in ("", *_OURS) else package


def _module_at_top(traceback: TracebackType | None) -> str | None:
    """The first foreign module whose own lines, not those of a function, the error passed through:
    only an import runs them."""
    while traceback is not None:
        name = str(traceback.tb_frame.f_globals.get("__name__", ""))
        foreign = name.partition(".")[0] not in (*_OURS, "__main__")
        if traceback.tb_frame.f_code.co_name == "<module>" and foreign:
            return name
        traceback = traceback.tb_next
    return None


def _unparsed(error: BaseException) -> str | None:
    """The module in a file that is no Python: none of its lines ran, so no traceback names it."""
    if not isinstance(error, SyntaxError) or error.filename is None:
        return None
    file = Path(error.filename)
    folders = [Path(folder) for folder in sys.path if file.is_relative_to(folder)]
    if not folders:
        return None
    return file.relative_to(max(folders, key=lambda folder: len(folder.parts))).parts[0]


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
