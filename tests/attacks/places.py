"""Files that are none: devices, pipes, sockets, loops, folders where a file should be."""

import os
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType

LONG = "n" * 256  # one more than a name may have


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    """Bound through the folder's descriptor: a socket's own path has 108 bytes at most."""
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def _link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _file_of(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content)


def _full_folder(path: Path) -> None:
    path.mkdir()
    (path / "thing").write_text("a user's own")


def _sparse(path: Path) -> None:
    """A terabyte of zeros that takes no room."""
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def _unreadable(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)


def _closed_folder(path: Path) -> None:
    _full_folder(path)
    path.chmod(0o500)


def _nothing(path: Path) -> None:
    """A name without a file."""


# What may lie where a command looks.
SPECIAL: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {
        "fifo": _fifo,
        "socket": _socket,
        "zero": _link_to("/dev/zero"),
        "null": _link_to("/dev/null"),
        "full": _link_to("/dev/full"),
        "random": _link_to("/dev/urandom"),
        "memory": _link_to("/proc/self/mem"),
        "loop": lambda path: path.symlink_to(path.name),
        "dangling": _link_to("nowhere"),
        "here": _link_to("."),
        "root": _link_to("/"),
        "empty file": _file_of(b""),
        "zeros": _file_of(b"\0" * 5000),
        "text": _file_of(b"a user's own\n"),
        "sparse": _sparse,
        "empty folder": lambda path: path.mkdir(),
        "full folder": _full_folder,
        "unreadable": _unreadable,
        "closed folder": _closed_folder,
        "missing": _nothing,
    }
)
# What may be said in a path's place; made by `odd_path` where it needs something on disk.
PATHS = (
    *(
        "",
        ".",
        "..",
        "/",
        "//",
        "./",
        "~",
        "-",
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/dev/stdin",
    ),
    *("/proc/self/fd", "/proc/self/mem", "/dev/stdout", "/proc/1/root", "/sys", "nowhere/x", LONG),
    *(f"{LONG}/x", "d/" * 2100 + "x", "x" * 5000, "a\nb", "a\tb", "*", "?", "[x", "$HOME", "{x}"),
    *(
        "\udcff\udcfe",
        "b\udc80d/\udcff",
        "é",
        "日本",
        "words.txt/x",
        "owner/name",
        "a:b",
        "con",
        " ",
    ),
    *(
        "x" * 255,
        "x" * 250,
        "model",
        "model/",
        "model/..",
        "model/new",
        "out/",
        "./out",
        "out.partial",
    ),
)


def replace(rng: Random, path: Path) -> str:
    """Put something special in the place of a file or a folder; returns what."""
    kind = rng.choice(list(SPECIAL))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    SPECIAL[kind](path)
    return kind


def odd_path(rng: Random, folder: Path) -> str:
    """A path that is odd; where it has bytes that are no text, half the time there is a folder."""
    found = rng.choice(PATHS)
    if ("\udc80" in found or "\udcff" in found) and rng.random() < 0.5:
        (folder / found).parent.mkdir(exist_ok=True, parents=True)
    return found
