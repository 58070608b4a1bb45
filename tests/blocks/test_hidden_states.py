"""Hidden states in memory and in a file are the same bits; kept ones are there for the next run."""

import os
from pathlib import Path

import pytest
import torch

from compress.blocks.states import HiddenStates
from compress.checkpoint import disk
from compress.errors import OutputError

SHAPES = [(3, 5, 4), (7, 2, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [1, 1 << 20])
def test_what_is_written_is_read(tmp_path: Path, dtype: torch.dtype, budget: int) -> None:
    path = tmp_path / "states.bin"
    values = [torch.randn(shape).to(dtype) for shape in SHAPES]
    with HiddenStates(path, SHAPES, dtype, budget=budget) as states:
        assert path.exists() == (budget == 1)
        for index, value in enumerate(values):
            states.write(index, value)
        changed = torch.randn(2, 2, 4).to(dtype)
        states.write(1, changed, start=3)
        values[1][3:5] = changed
        for index, value in enumerate(values):
            assert torch.equal(states.read(index), value)
        assert torch.equal(states.read(1, 2, 6), values[1][2:6])
        assert torch.equal(states.read(1, 6, 99), values[1][6:])
    assert not path.exists()


def test_in_memory_leaves_files_alone(tmp_path: Path) -> None:
    path = tmp_path / "states.bin"
    path.write_text("another's")
    with HiddenStates(path, SHAPES, torch.float32, budget=1 << 20) as states:
        states.write(0, torch.ones(SHAPES[0]))
    assert path.read_text() == "another's"


def test_kept_states_are_read_by_another_process_in_other_batches(tmp_path: Path) -> None:
    """The file has the rows in order, however they are cut."""
    path, rows = tmp_path / "hidden.0", torch.randn(10, 5, 4)
    first = HiddenStates(path, [(4, 5, 4), (4, 5, 4), (2, 5, 4)], torch.float32)
    assert not path.exists()
    for index, part in enumerate(rows.split(4)):
        first.write(index, part)
    first.flush()
    later = HiddenStates(path, [(10, 5, 4)], torch.float32)
    assert torch.equal(later.read(0), rows)
    assert torch.equal(later.read(0, 3, 7), rows[3:7])


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(disk, "fallocate", full)
    with pytest.raises(OutputError, match=r"cannot keep 384 bytes of hidden states in .*make room"):
        HiddenStates(tmp_path / "s.bin", [(8, 12)], torch.float32, budget=1)
    monkeypatch.setattr(disk, "pwrite", full)
    kept = HiddenStates(tmp_path / "hidden.0", [(8, 12)], torch.float32)
    with pytest.raises(OutputError, match=r"cannot write \S+hidden\.0: .*make room"):
        kept.write(0, torch.ones(8, 12))


def test_a_file_cut_short_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with HiddenStates(path, [(8, 12)], torch.float32, budget=1) as states:
        states.write(0, torch.ones(8, 12))
        os.truncate(path, 100)
        short = r"s\.bin became shorter while it was in use; leave the work folder alone"
        with pytest.raises(OutputError, match=short):
            states.read(0)
    kept = HiddenStates(tmp_path / "hidden.0", [(8, 12)], torch.float32)
    with pytest.raises(OutputError, match=r"cannot read .*No such file.*; remove .* start again"):
        kept.read(0)
    kept.write(0, torch.ones(7, 12))
    short = r"hidden\.0 became shorter after it was opened; remove .* and start again"
    with pytest.raises(OutputError, match=short):
        kept.read(0)
