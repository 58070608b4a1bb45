"""What a checkpoint held when its sha256 was made, so that what is read later is held to it.

One pass over the files makes the sha256 and a fast digest of every chunk of every tensor. It also
says that headers and config.json are those that were parsed before.
"""

import hashlib
import os
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from compress.checkpoint.chunks import CHUNK, HEADER, FileDigests, digests_of
from compress.checkpoint.reading import content_of, pieces, read_parts, reading
from compress.checkpoint.shards.gguf_header import SUFFIX, parse_gguf_header
from compress.checkpoint.shards.header import LENGTH, TensorInfo, parse_header
from compress.checkpoint.sidefiles import carried, parsed, skipped
from compress.checkpoint.small_files import LEAVE_ALONE, SmallFiles, hash_of, heading
from compress.errors import CheckpointError

CONFIG = "config.json"
# A file written so shortly before it was looked at may be written again in the same tick of the
# clock (10 ms at most on Linux, 2 s on FAT), which its time does not tell.
_SETTLED_NS = 3_000_000_000


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file as the filesystem describes it. settled: it was not written just before, so that a
    later change shows in the stamp."""

    device: int
    inode: int
    size: int
    modified_ns: int
    settled: bool


@dataclass(frozen=True, slots=True, eq=False)
class Seal:
    """sha256: of config.json and all weight files. small: name -> hash of what lies beside them.
    side: names of those that are carried over. skipped: what is left behind, with reasons. stamps:
    of the weight files. digests: by file and first byte, of every chunk of a tensor; at 0, of the
    header.
    """

    sha256: str
    small: Mapping[str, str]
    side: tuple[str, ...]
    skipped: Mapping[str, str]
    stamps: Mapping[str, Stamp]
    digests: Mapping[tuple[str, int], "array[int]"]

    def read_into(self, folder: Path, info: TensorInfo, target: memoryview, offset: int) -> None:
        """Fill `target` from byte `offset` of a tensor on, and hold it to what was hashed: all
        chunks that it touches are read. CheckpointError names a tensor that changed."""
        stop = offset + len(target)
        begin = offset - offset % CHUNK
        end = min(-(-stop // CHUNK) * CHUNK, info.nbytes)
        before, behind = (memoryview(bytearray(n)) for n in (offset - begin, end - stop))
        parts = [before, target, behind]
        read_parts(folder / info.file, parts, info.start + begin)
        found = digests_of(parts)
        first = begin // CHUNK
        if found != self.digests[info.file, info.start][first : first + len(found)]:
            raise _changed_tensor(folder, info)

    def require_unchanged(self, folder: Path, tensors: Iterable[TensorInfo]) -> None:
        """CheckpointError when any file is gone or no longer what was hashed. Weights are read only
        where their files were written, or may have been."""
        SmallFiles(folder, self.small).require_unchanged()
        infos = list(tensors)
        for file, stamp in self.stamps.items():
            with reading(folder / file):
                now = _stamp(os.stat(folder / file))
            if not stamp.settled or now != stamp:
                self._reread(folder, file, [info for info in infos if info.file == file])

    def _reread(self, folder: Path, file: str, infos: Iterable[TensorInfo]) -> None:
        held = FileDigests.of((info.start, info.nbytes) for info in infos)
        with reading(folder / file), (folder / file).open("rb", buffering=0) as stream:
            for piece in pieces(stream.fileno()):
                held.update(piece)
        found = held.finish()
        for info in infos:
            if info.nbytes and found[info.start] != self.digests[file, info.start]:
                raise _changed_tensor(folder, info)
        same_size = held.done + held.beyond == self.stamps[file].size
        if found[HEADER] != self.digests[file, HEADER] or not same_size:
            raise _changed(folder / file, "hashed")


def make_seal(
    folder: Path, files: Sequence[str], tensors: Mapping[str, TensorInfo], config_hash: str
) -> Seal:
    """Read all files of a checkpoint that was opened before: `tensors` as its headers had them,
    config_hash: of config.json as it was parsed. CheckpointError when they changed since."""
    with reading(folder):
        side = tuple(path.name for path in carried(folder, files))
        left, read = skipped(folder, files), parsed(folder)
    config = content_of(folder / CONFIG)
    if hash_of(CONFIG, config) != config_hash:
        raise _changed(folder / CONFIG, "opened")
    small = {CONFIG: config_hash}
    for name in dict.fromkeys((*read, *side)):
        small[name] = hash_of(name, content_of(folder / name))
    whole = hashlib.sha256(heading(CONFIG, len(config)) + config)
    stamps: dict[str, Stamp] = {}
    digests: dict[tuple[str, int], array[int]] = {}
    for file in files:
        infos = {name: info for name, info in tensors.items() if info.file == file}
        stamps[file], found = _hash_weights(folder, file, infos, whole)
        digests |= {(file, start): found[start] for start in found}
    return Seal(whole.hexdigest(), small, side, left, stamps, digests)


def _hash_weights(
    folder: Path, file: str, infos: Mapping[str, TensorInfo], whole: "hashlib._Hash"
) -> tuple[Stamp, dict[int, "array[int]"]]:
    """Digests of a file by first byte, while its bytes go into `whole`."""
    path, held = folder / file, FileDigests.of((x.start, x.nbytes) for x in infos.values())
    with reading(path), path.open("rb", buffering=0) as stream:
        stamp = _stamp(os.fstat(stream.fileno()))
        whole.update(heading(file, stamp.size))
        for piece in pieces(stream.fileno()):
            whole.update(piece)
            held.update(piece)
    whole_size = held.done + held.beyond
    if whole_size != stamp.size or not _as_opened(held.header, path, stamp, infos):
        raise _changed(path, "opened")
    return stamp, held.finish()


def _as_opened(
    header: bytearray, path: Path, stamp: Stamp, infos: Mapping[str, TensorInfo]
) -> bool:
    """Whether a header, with its length, still says what it said when the file was opened, and the
    file is as long as it says."""
    raw = bytes(header)
    try:
        if path.suffix == SUFFIX:
            found = parse_gguf_header(raw, path, path.name, stamp.size).tensors
        else:
            found = parse_header(raw[LENGTH:], path, path.name, stamp.size)
    except CheckpointError:
        return False
    # A head that is the embedding under a second name is in no header.
    return all(
        name in infos and info == replace(infos[name], file=path.name)
        for name, info in found.items()
    )


def _stamp(status: os.stat_result) -> Stamp:
    settled = status.st_mtime_ns < time.time_ns() - _SETTLED_NS
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, settled)


def _changed(what: Path | str, since: Literal["opened", "hashed"]) -> CheckpointError:
    return CheckpointError(f"{what} changed after it was {since}; {LEAVE_ALONE}")


def _changed_tensor(folder: Path, info: TensorInfo) -> CheckpointError:
    return _changed(f"tensor {info.name!r} in {folder / info.file}", "hashed")
