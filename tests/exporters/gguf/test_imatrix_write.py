"""Importance of columns as llama-quantize reads it: by the package gguf, and byte by byte."""

import struct
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from compress_exporters.gguf.imatrix_write import Importance, write_imatrix

KNOWN = {
    "blk.1.ffn_down_exps.weight": Importance(
        torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([600, 0])
    ),
    "blk.0.attn_q.weight": Importance(torch.tensor([[0.5, 0.25, 4.0]]), torch.tensor([1024])),
    "blk.2.ffn_up_exps.weight": Importance(torch.zeros(1, 2), torch.tensor([0])),
}


def test_gguf_has_sums_counts_and_where_they_are_from(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "imatrix.gguf"
    write_imatrix(path, KNOWN, 512, ["tales.txt"])
    reader = gguf.GGUFReader(path)
    fields = {name: reader.get_field(name).contents() for name in ("general.type",)}
    fields |= {x: reader.get_field(f"imatrix.{x}").contents() for x in ("chunk_count", "datasets")}
    assert fields == {"general.type": "imatrix", "chunk_count": 2, "datasets": ["tales.txt"]}
    assert reader.get_field("imatrix.chunk_size").contents() == 512
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    assert list(stored)[:2] == ["blk.0.attn_q.weight.in_sum2", "blk.0.attn_q.weight.counts"]
    assert stored["blk.0.attn_q.weight.in_sum2"].tolist() == [[512.0, 256.0, 4096.0]]
    assert stored["blk.1.ffn_down_exps.weight.counts"].tolist() == [[600.0], [0.0]]
    assert stored["blk.1.ffn_down_exps.weight.in_sum2"].tolist() == [[600, 1200], [0, 0]]


def test_dat_has_means_times_calls(tmp_path: Path) -> None:
    """Experts that no token reached weigh alike, and what has no data at all is left out."""
    path = tmp_path / "imatrix.dat"
    write_imatrix(path, KNOWN, 512, ["a.txt", "b.txt"], older=True)
    data = path.read_bytes()
    wanted = struct.pack("<i", 2)
    for name, calls, values in (
        (b"blk.0.attn_q.weight", 2, [1.0, 0.5, 8.0]),
        (b"blk.1.ffn_down_exps.weight", 2, [2.0, 4.0, 2.0, 2.0]),
    ):
        wanted += struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, len(values))
        wanted += np.array(values, "<f4").tobytes()
    assert data == wanted + struct.pack("<ii", 2, 5) + b"b.txt"


class OneAtATime(dict[str, Importance]):
    """Makes each when it is asked for, and none of the ones before may be there."""

    last: "weakref.ref[torch.Tensor] | None" = None

    def __getitem__(self, name: str) -> Importance:
        assert self.last is None or self.last() is None
        known = super().__getitem__(name)
        made = Importance(known.mean.clone(), known.tokens)
        self.last = weakref.ref(made.mean)
        return made


@pytest.mark.parametrize("older", [True, False])
def test_one_tensor_is_in_memory(older: bool, tmp_path: Path) -> None:
    write_imatrix(tmp_path / "a", KNOWN, 512, older=older)
    write_imatrix(tmp_path / "b", OneAtATime(KNOWN), 512, older=older)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
