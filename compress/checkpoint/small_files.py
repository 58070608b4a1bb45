"""The small files of a checkpoint's folder: config.json, tokenizer and so on, by name.

Once their hashes are known, what is read is what was hashed, or nothing.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.checkpoint import disk
from compress.checkpoint.jsonfile import parse_object
from compress.checkpoint.reading import content_of
from compress.errors import CheckpointError

LEAVE_ALONE = "leave a model alone while it is read, and run this again"


@dataclass(frozen=True, slots=True)
class SmallFiles:
    """hashes: name -> `hash_of` its content; None where nothing was hashed and any content will
    do."""

    folder: Path
    hashes: Mapping[str, str] | None = None

    def read(self, name: str) -> bytes:
        """CheckpointError when it cannot be read, or is not what was hashed."""
        path = self.folder / name
        content = content_of(path)
        if self.hashes is None:
            return content
        if name not in self.hashes:
            raise CheckpointError(f"{path} came after the model was hashed; {LEAVE_ALONE}")
        if hash_of(name, content) != self.hashes[name]:
            raise CheckpointError(f"{path} changed after it was hashed; {LEAVE_ALONE}")
        return content

    def find(self, name: str) -> bytes | None:
        """The same; None where there is no such file, and was none."""
        known = self.hashes is not None and name in self.hashes
        return self.read(name) if known or os.path.exists(self.folder / name) else None

    def find_object(self, name: str) -> dict[str, Any]:
        """The JSON object in a file, empty where there is none. CheckpointError for other JSON."""
        content = self.find(name)
        return {} if content is None else parse_object(content, self.folder / name)

    @contextmanager
    def in_folder(self) -> Iterator[Path]:
        """A folder with these files, for packages that read one themselves: this one, or, where it
        may have changed, one for the time being with what was hashed."""
        if self.hashes is None:
            yield self.folder
            return
        with tempfile.TemporaryDirectory(prefix="compress-model-") as made:
            for name in self.hashes:
                with disk.refusing(f"copy {name} to {made}", "make room there, or set TMPDIR"):
                    (Path(made) / name).write_bytes(self.read(name))
            yield Path(made)

    def require_unchanged(self) -> None:
        """CheckpointError for one that is gone, or no longer what was hashed."""
        for name in self.hashes or ():
            self.read(name)


def hash_of(name: str, content: bytes) -> str:
    """sha256 of a small file, with its name and size."""
    digest = hashlib.sha256(heading(name, len(content)))
    digest.update(content)
    return digest.hexdigest()


def heading(name: str, size: int) -> bytes:
    """What stands before the content of a file in a hash."""
    return f"{name}\0{size}\0".encode()
