"""Hidden states in memory and in a file are the same bits."""

import os
from pathlib import Path

import pytest
import torch

from compress.checkpoint import disk
from compress.errors import OutputError
from compress.evaluation.store import TensorStore

SHAPES = [(3, 5, 4), (7, 2, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [1, 1 << 20])
def test_what_is_written_is_read(tmp_path: Path, dtype: torch.dtype, budget: int) -> None:
    path = tmp_path / "states.bin"
    values = [torch.randn(shape).to(dtype) for shape in SHAPES]
    with TensorStore(path, SHAPES, dtype, budget) as store:
        assert path.exists() == (budget == 1)
        for index, value in enumerate(values):
            store.write(index, value)
        changed = torch.randn(2, 2, 4).to(dtype)
        store.write(1, changed, start=3)
        values[1][3:5] = changed
        for index, value in enumerate(values):
            assert torch.equal(store.read(index), value)
        assert torch.equal(store.read(1, 2, 6), values[1][2:6])
        assert torch.equal(store.read(1, 6, 99), values[1][6:])
    assert not path.exists()


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(disk, "fallocate", full)
    with pytest.raises(OutputError, match=r"cannot keep 384 bytes of hidden states in .*make room"):
        TensorStore(tmp_path / "s.bin", [(8, 12)], torch.float32, 1)


def test_a_file_cut_short_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with TensorStore(path, [(8, 12)], torch.float32, 1) as store:
        store.write(0, torch.ones(8, 12))
        os.truncate(path, 100)
        with pytest.raises(OutputError, match=r"s\.bin became shorter while it was in use"):
            store.read(0)
