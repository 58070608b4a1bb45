"""ShardWriter: the bytes follow from the layout alone, and the safetensors library reads them."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from compress.checkpoint import Checkpoint, ShardLayout, ShardWriter, disk, plan_shards
from compress.checkpoint.shards import writer
from compress.checkpoint.shards.dtype_codes import itemsize
from compress.checkpoint.shards.dtypes import DTYPE_CODES, TORCH_DTYPES
from compress.errors import OutputError
from conftest import tree_hashes
from helpers.faults import Killed, counting, fault_at

TENSORS = {
    "model.a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "model.a.zero": torch.arange(5, dtype=torch.int8),
    "model.b.packed": torch.arange(6, dtype=torch.int32).reshape(2, 3),
    "model.b.scale": torch.ones(2, 1, dtype=torch.bfloat16),
    "model.shape": torch.tensor([3, 4]),
    "model.scalar": torch.tensor(2.5, dtype=torch.float16),
    "model.none": torch.zeros(0, 3),
}


def entries(tensors: dict[str, torch.Tensor] = TENSORS) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, DTYPE_CODES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]


def write_all(folder: Path, layout: ShardLayout, order: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    shards = ShardWriter.create(folder, layout)
    for name in order:
        shards.write(name, TENSORS[name])
    shards.flush(order)
    shards.finish()


def opened(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder by the safetensors library, through the index when there is one."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found = {}
    for file in files:
        with safe_open(folder / file, "pt") as theirs:
            assert theirs.metadata() == {"format": "pt"}
            found.update({name: theirs.get_tensor(name) for name in theirs.keys()})  # noqa: SIM118
    return found


@pytest.mark.parametrize("max_bytes", [1, 40, 64, 10**9])
def test_library_and_reader_open_what_was_written(tmp_path: Path, max_bytes: int) -> None:
    layout = plan_shards(entries(), max_bytes)
    write_all(tmp_path, layout, list(TENSORS))
    theirs = opened(tmp_path)
    assert theirs.keys() == TENSORS.keys()
    (tmp_path / "config.json").write_text("{}")
    ours = Checkpoint.open(tmp_path)
    for name, expected in TENSORS.items():
        for found in (theirs[name], ours.read(name)):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    assert sizes == {file.name: file.size for file in layout.files}
    assert layout.total_bytes == sum(sizes.values())
    assert ours.tensors == layout.tensors


def test_bytes_do_not_depend_on_the_order_of_writes(tmp_path: Path) -> None:
    layout = plan_shards(entries(), 40)
    write_all(tmp_path / "a", layout, list(TENSORS))
    write_all(tmp_path / "b", layout, sorted(TENSORS, reverse=True) + sorted(TENSORS))
    assert tree_hashes(tmp_path / "a") == tree_hashes(tmp_path / "b")


@given(
    st.lists(
        st.tuples(st.sampled_from(list(TORCH_DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=8,
    ),
    st.integers(1, 200),
)
@settings(max_examples=100, deadline=None)
def test_layout_keeps_order_limits_and_alignment(
    shapes: list[tuple[str, list[int]]], max_bytes: int
) -> None:
    wanted = [(f"t{i}", code, tuple(shape)) for i, (code, shape) in enumerate(shapes)]
    layout = plan_shards(wanted, max_bytes)
    by_file = [{info.name for info in file.tensors} for file in layout.files]
    flat = [int(name[1:]) for names in by_file for name in sorted(names, key=lambda n: int(n[1:]))]
    assert flat == list(range(len(wanted)))
    for file in layout.files:
        values = sum(info.nbytes for info in file.tensors)
        assert values <= max_bytes or len([i for i in file.tensors if i.nbytes]) == 1
        assert file.size == len(file.header) + values
        assert all(info.start % itemsize(info.dtype) == 0 for info in file.tensors)
    assert layout.files == plan_shards(wanted, max_bytes).files


def test_names_and_index_of_shards() -> None:
    layout = plan_shards([("z", "F32", (4,)), ("y", "F32", (4,)), ("x", "F32", (4,))], 16)
    assert [file.name for file in layout.files] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    index = json.loads(layout.index() or b"")
    assert index["metadata"] == {"total_size": 48}
    assert list(index["weight_map"]) == ["x", "y", "z"]
    assert plan_shards([("z", "F32", (4,))], 16).index() is None
    with pytest.raises(AssertionError, match="appears twice"):
        plan_shards([("z", "F32", (4,)), ("z", "F32", (4,))], 16)


def test_strided_tensors_and_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "pwrite", lambda fd, data, at: os.pwrite(fd, data[:5], at))
    values = torch.arange(12.0).reshape(3, 4)
    shards = ShardWriter.create(tmp_path, plan_shards([("t", "F32", (4, 3))], 100))
    shards.write("t", values.T)
    shards.finish()
    assert torch.equal(opened(tmp_path)["t"], values.T)


def test_tensor_in_slices_of_rows(tmp_path: Path) -> None:
    values = torch.arange(21, dtype=torch.int16).reshape(7, 3)
    shards = ShardWriter.create(tmp_path, plan_shards([("t", "I16", (7, 3))], 100))
    shards.write_rows("t", 0, values[:4])
    with pytest.raises(AssertionError, match="row 5 is out of order"):
        shards.write_rows("t", 5, values[5:])
    with pytest.raises(AssertionError, match="row 8 does not fit"):
        shards.write_rows("t", 4, values[:4])
    with pytest.raises(AssertionError, match="never written"):
        shards.finish()
    shards.write_rows("t", 4, values[4:])
    shards.finish()
    assert torch.equal(opened(tmp_path)["t"], values)


def test_unfinished_file_cannot_be_read(tmp_path: Path) -> None:
    layout = plan_shards(entries(), 10**9)
    shards = ShardWriter.create(tmp_path, layout)
    for name, tensor in TENSORS.items():
        shards.write(name, tensor)
    with (
        pytest.raises(Exception, match=r"[Hh]eader"),
        safe_open(tmp_path / "model.safetensors", "pt"),
    ):
        pass


def test_what_does_not_fit_the_layout_is_our_fault(tmp_path: Path) -> None:
    shards = ShardWriter.create(tmp_path, plan_shards(entries(), 10**9))
    with pytest.raises(AssertionError, match="does not fit"):
        shards.write("model.a.weight", torch.zeros(4, 3))
    with pytest.raises(AssertionError, match="does not fit"):
        shards.write("model.a.weight", torch.zeros(3, 4).half())
    shards.write("model.a.weight", TENSORS["model.a.weight"])
    with pytest.raises(AssertionError, match=r"never written: \['model.a.zero'"):
        shards.finish()
    shards.finish([name for name in TENSORS if name != "model.a.weight"])


def test_no_space_is_found_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = plan_shards(entries(), 10**9)
    monkeypatch.setattr(writer, "free_bytes", lambda path: layout.total_bytes - 1)
    with pytest.raises(OutputError) as caught:
        ShardWriter.create(tmp_path, layout)
    assert str(caught.value) == (
        f"not enough disk space in {tmp_path}: {layout.total_bytes} bytes are needed,"
        f" {layout.total_bytes - 1} are free; make room or choose another disk"
    )
    assert list(tmp_path.iterdir()) == []


def test_space_that_is_reserved_already_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = plan_shards([("t", "F32", (1024, 64))], 10**9)
    ShardWriter.create(tmp_path, layout)
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 >= layout.total_bytes
    monkeypatch.setattr(writer, "free_bytes", lambda path: 0)
    ShardWriter.create(tmp_path, layout)


def test_full_disk_while_reserving_or_writing(tmp_path: Path) -> None:
    layout = plan_shards(entries(), 10**9)
    with (
        fault_at(0, "enospc"),
        pytest.raises(OutputError, match=r"reserve .*: No space left.*room"),
    ):
        ShardWriter.create(tmp_path, layout)
    shards = ShardWriter.create(tmp_path, layout)
    with fault_at(0, "enospc"), pytest.raises(OutputError, match=r"cannot write .*: No space left"):
        shards.write("model.a.weight", TENSORS["model.a.weight"])


def test_filesystem_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    write_all(tmp_path, plan_shards(entries(), 10**9), list(TENSORS))
    assert opened(tmp_path).keys() == TENSORS.keys()


def test_the_disk_is_told_of_large_tensors_and_may_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def refuse(fd: int, offset: int, length: int, advice: int) -> None:
        told.append((offset, length, advice))
        raise OSError("a filesystem without it")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    large, small = torch.ones(1 << 18), torch.ones(4)
    layout = plan_shards([("large", "F32", (1 << 18,)), ("small", "F32", (4,))], 10**9)
    shards = ShardWriter.create(tmp_path, layout)
    shards.write("large", large)
    shards.write("small", small)
    shards.finish()
    assert told == [(layout.tensors["large"].start, 1 << 20, os.POSIX_FADV_DONTNEED)]
    assert torch.equal(opened(tmp_path)["large"], large)


def test_reopen_refuses_other_files(tmp_path: Path) -> None:
    layout = plan_shards(entries(), 10**9)
    with pytest.raises(
        OutputError, match=r"cannot resume: .*model.safetensors is missing, expected"
    ):
        ShardWriter.reopen(tmp_path, layout)
    (tmp_path / "model.safetensors").write_bytes(b"123")
    with pytest.raises(OutputError, match=r"has 3 bytes, expected \d+ bytes; remove"):
        ShardWriter.reopen(tmp_path, layout)


@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("effect", ["before", "torn", "after"])
def test_kill_anywhere_and_write_again(tmp_path: Path, effect: str) -> None:
    layout = plan_shards(entries(), 40)
    with counting() as calls:
        write_all(tmp_path / "whole", layout, list(TENSORS))
    expected = tree_hashes(tmp_path / "whole")
    assert {"pwrite", "fsync", "rename", "fallocate"} <= set(calls.names)
    for number in range(len(calls)):
        folder = tmp_path / f"{number}"
        with fault_at(number, effect), pytest.raises(Killed):
            write_all(folder, layout, list(TENSORS))
        write_all(folder, layout, list(reversed(TENSORS)))
        assert tree_hashes(folder) == expected


def test_reopened_writer_needs_no_rewrite_of_flushed_tensors(tmp_path: Path) -> None:
    layout = plan_shards(entries(), 40)
    names = list(TENSORS)
    write_all(tmp_path / "whole", layout, names)
    (tmp_path / "two").mkdir()
    first = ShardWriter.create(tmp_path / "two", layout)
    for name in names[:3]:
        first.write(name, TENSORS[name])
    first.flush(names[:3])
    second = ShardWriter.reopen(tmp_path / "two", layout)
    for name in names[3:]:
        second.write(name, TENSORS[name])
    second.finish(names[:3])
    second.finish(names[:3])
    assert tree_hashes(tmp_path / "two") == tree_hashes(tmp_path / "whole")
