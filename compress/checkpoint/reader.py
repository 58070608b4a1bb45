"""Checkpoint: read-only view of a Hugging Face directory, streamed.

Weights are read with preadv into fresh memory, never mapped: pages of a mapped file count as
resident memory, and a file that shrinks under a mapping kills the process.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from compress.checkpoint.detect import without_block
from compress.checkpoint.gguf_file import GGUF_FILE, place_of
from compress.checkpoint.in_memory import told
from compress.checkpoint.index import INDEX, weight_files
from compress.checkpoint.jsonfile import parse_object
from compress.checkpoint.quant_file import with_quant_file
from compress.checkpoint.reading import content_of, pieces, read_into, reading
from compress.checkpoint.regular import open_regular, usable
from compress.checkpoint.seal import CONFIG, Seal, make_seal
from compress.checkpoint.shards.gguf_header import Scalar, read_gguf_header
from compress.checkpoint.shards.header import TensorInfo, count_params, main_dtype, read_header
from compress.checkpoint.sidefiles import carried, skipped
from compress.checkpoint.small_files import SmallFiles, hash_of, heading
from compress.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint whose structure has been checked and whose weights have not been read.

    path: the folder. config: config.json, with what some tools say in a file beside it of how the
    model is quantized. tensors: name -> TensorInfo, in the order in which they lie on disk. files:
    names of the weight files, in order. config_hash: of config.json as it was parsed. seal: what
    the files held when they were hashed; every read is held to it. gguf: what a GGUF file says
    beside its tensors, which go by its own names and types; None for safetensors.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: tuple[str, ...]
    config_hash: str = ""
    seal: Seal | None = None
    gguf: Mapping[str, Scalar] | None = None

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Check the structure of a folder (headers, index, sizes) and describe it.

        path: the folder, or a GGUF file in it. Raises CheckpointError, in one line, for anything
        that would make a later read fail.
        """
        folder, file = place_of(usable(path, "model", CheckpointError))
        raw = content_of(_require_config(folder, file))
        config = parse_object(raw, folder / CONFIG)
        if file is not None:
            head = read_gguf_header(folder / file, file)
            held = MappingProxyType(head.tensors)
            # The file says itself how it is stored: the config may be that of a quantized source.
            plain, hashed = without_block(config), hash_of(CONFIG, raw)
            return cls(folder, plain, held, (file,), hashed, gguf=head.fields)
        with reading(folder):
            files, weight_map = weight_files(folder)
        tensors = _read_headers(folder, files)
        if weight_map is not None:
            _check_index(folder, weight_map, tensors)
        config = with_quant_file(folder, config, tensors)
        held = MappingProxyType(tensors)
        return cls(folder, config, held, tuple(files), hash_of(CONFIG, raw))

    def sealed(self) -> "Checkpoint":
        """The same, hashed: all files are read once, and what is read from now on is what was
        hashed, or a CheckpointError. That is raised here, too, for what changed since `open`."""
        return replace(self, seal=make_seal(self.path, self.files, self.tensors, self.config_hash))

    def require_unchanged(self) -> None:
        """CheckpointError when a file of a sealed checkpoint is gone or no longer what was hashed;
        weights are read again where their files were written."""
        assert self.seal is not None, "nothing was hashed"
        self.seal.require_unchanged(self.path, self.tensors.values())

    def read(self, name: str, *, check_finite: bool = False) -> "Tensor":
        """A whole tensor, in fresh CPU memory and the dtype it is stored in.

        check_finite: raises CheckpointError with number and place of NaN and infinity.
        """
        info = self.tensors[name]
        assert self.gguf is None, "values of a GGUF file are read by its weights"
        tensor = self._load(info, 0, info.shape)
        if check_finite:
            self._refuse_nonfinite(info, tensor)
        return tensor

    def read_rows(
        self, name: str, start: int, stop: int, *, check_finite: bool = False
    ) -> "Tensor":
        """Rows start..stop of dimension 0: [stop - start, ...]; check_finite as for `read`."""
        info = self.tensors[name]
        assert 0 <= start <= stop <= info.shape[0], (name, info.shape, start, stop)
        row = info.nbytes // max(info.shape[0], 1)
        rows = self._load(info, start * row, (stop - start, *info.shape[1:]))
        if check_finite:
            self._refuse_nonfinite(info, rows, start)
        return rows

    def _refuse_nonfinite(self, info: TensorInfo, values: "Tensor", start: int = 0) -> None:
        """CheckpointError for NaN and infinity in rows of a tensor that begin at `start`."""
        from compress.checkpoint.shards.finite import find_nonfinite

        bad = find_nonfinite(values)
        if bad is not None:
            found = (bad.below(start) if start else bad).describe()
            raise CheckpointError(
                f"tensor {info.name!r} in {self.path / info.file} has {found}; repair the"
                " checkpoint or download it again"
            )

    def _load(self, info: TensorInfo, offset: int, shape: tuple[int, ...]) -> "Tensor":
        # Late: what a checkpoint holds is told without torch, which takes a second to import.
        import torch

        from compress.checkpoint.shards.dtypes import TORCH_DTYPES

        tensor = torch.empty(shape, dtype=TORCH_DTYPES[info.dtype])
        self._fill(tensor.reshape(-1).view(torch.uint8), info, offset)
        return tensor

    def read_bytes(self, name: str, start: int, stop: int) -> "Tensor":
        """Bytes start..stop of a tensor as they lie in its file: uint8 [stop - start]."""
        import torch

        info = self.tensors[name]
        assert 0 <= start <= stop <= info.nbytes, (name, info.nbytes, start, stop)
        found = torch.empty(stop - start, dtype=torch.uint8)
        self._fill(found, info, start)
        return found

    def _fill(self, data: "Tensor", info: TensorInfo, offset: int) -> None:
        """data: uint8 [bytes], filled with those of a tensor from byte `offset` on."""
        if not data.numel():
            return
        target = data.numpy().data
        if self.seal is None:
            read_into(self.path / info.file, target, info.start + offset)
        else:
            self.seal.read_into(self.path, info, target, offset)

    @property
    def named(self) -> Path:
        """What a user opens it by: the folder, or a GGUF file in it that is not the only one."""
        alone = self.gguf is None or self.files[0] == GGUF_FILE
        return self.path if alone else self.path / self.files[0]

    @property
    def told(self) -> str:
        """What reports call it: the path that opens it, or the name of one that was in memory."""
        return told(self.named)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers left out."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Size of the weight files, headers included: what reports and plans call a size."""
        if self.seal is not None:
            return sum(stamp.size for stamp in self.seal.stamps.values())
        with reading(self.path):
            return sum((self.path / name).stat().st_size for name in self.files)

    @property
    def params(self) -> int:
        """Elements of all tensors; of one that has two names, once."""
        return count_params(self.tensors.values())

    @property
    def main_dtype(self) -> str:
        """Dtype code that most of the bytes are stored in."""
        return main_dtype(self.tensors.values())

    def sha256(self) -> str:
        """Hash of config.json and all weight files with their names and sizes; reads them all,
        unless it is sealed."""
        if self.seal is not None:
            return self.seal.sha256
        digest = hashlib.sha256()
        for file in (CONFIG, *self.files):
            _hash_file(self.path / file, file, digest)
        return digest.hexdigest()

    @property
    def small(self) -> SmallFiles:
        """The files beside the weights, by content."""
        return SmallFiles(self.path, None if self.seal is None else self.seal.small)

    def side_files(self) -> list[Path]:
        """Files that go with the weights unchanged: tokenizer, chat template, licence and so on."""
        if self.seal is not None:
            return [self.path / name for name in self.seal.side]
        with reading(self.path):
            return carried(self.path, self.files)

    @property
    def skipped_files(self) -> list[str]:
        """Names of folders (with a slash) and files that are neither used nor carried over.

        Where it is not plain from the name, the reason follows: "NAME (REASON)".
        """
        with reading(self.path):
            left = skipped(self.path, self.files) if self.seal is None else self.seal.skipped
        return [f"{name} ({reason})" if reason else name for name, reason in left.items()]

    def side_hashes(self) -> dict[str, str]:
        """sha256 of every side file, by name."""
        if self.seal is not None:
            return {name: self.seal.small[name] for name in self.seal.side}
        return {path.name: hash_of(path.name, content_of(path)) for path in self.side_files()}


def _require_config(folder: Path, file: str | None) -> Path:
    path = folder / CONFIG
    if os.path.lexists(path) and not path.is_file():
        raise CheckpointError(f"{path} is not a file; give the folder of a checkpoint")
    if path.is_file():
        return path
    if file is not None:
        raise CheckpointError(
            f"{path} is missing, which says what model {file} is of; put config.json and the"
            " tokenizer's files of that model beside it"
        )
    raise CheckpointError(f"{folder} has no config.json; give the folder of a checkpoint")


def _read_headers(folder: Path, files: list[str]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(folder / file, file).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name!r} is in both {tensors[name].file} and {file} of {folder}"
                )
            tensors[name] = info
    return tensors


def _check_index(
    folder: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> None:
    for name, file in weight_map.items():
        if name not in tensors:
            raise CheckpointError(
                f"{folder / file} lacks tensor {name!r} though {INDEX} says that it is there"
            )
        if tensors[name].file != file:
            raise CheckpointError(
                f"{folder / INDEX} says that tensor {name!r} is in {file}, but it is in"
                f" {tensors[name].file}"
            )
    for name, info in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{folder / info.file} has tensor {name!r}, unknown to {INDEX}")


def _hash_file(path: Path, name: str, digest: "hashlib._Hash") -> None:
    with reading(path), open_regular(path) as stream:
        digest.update(heading(name, os.fstat(stream.fileno()).st_size))
        for piece in pieces(stream.fileno()):
            digest.update(piece)
