"""What is read of a checkpoint is what was hashed, or a line that says what changed."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from compress.checkpoint import Checkpoint, chunks, seal
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.checkpoint.small_files import SmallFiles
from compress.errors import CheckpointError

CHUNK = 64
DTYPES = (torch.bfloat16, torch.float32, torch.int8, torch.float64)
FILE = "model.safetensors"
AGAIN = "leave a model alone while it is read, and run this again"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors have several."""
    monkeypatch.setattr(chunks, "CHUNK", CHUNK)
    monkeypatch.setattr(seal, "CHUNK", CHUNK)


def folder_of(folder: Path, tensors: dict[str, torch.Tensor], **files: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / FILE)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def flip(path: Path, place: int, bit: int = 0) -> None:
    """One bit of a file, in place."""
    with path.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 1 << bit]))


def refusal(ask: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        ask()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@st.composite
def reads(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], str, int, int, float]:
    """Tensors, one of them, rows of it, and where in the bytes of those rows something flips."""
    count = draw(st.integers(1, 4))
    tensors = {}
    for i in range(count):
        shape = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
        values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(i))
        tensors[f"t{i}"] = values.to(draw(st.sampled_from(DTYPES)))
    name = draw(st.sampled_from(sorted(tensors)))
    rows = tensors[name].shape[0]
    start = draw(st.integers(0, rows - 1))
    stop = draw(st.integers(start + 1, rows))
    return tensors, name, start, stop, draw(st.floats(0, 1, exclude_max=True))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(read=reads(), bit=st.integers(0, 7))
def test_a_bit_that_flips_in_what_is_read_is_found(
    tmp_path_factory: pytest.TempPathFactory, read: Any, bit: int
) -> None:
    tensors, name, start, stop, where = read
    folder = folder_of(tmp_path_factory.mktemp("m"), tensors)
    held = Checkpoint.open(folder).sealed()
    assert held.sha256() == Checkpoint.open(folder).sha256()
    for other, tensor in tensors.items():
        assert torch.equal(held.read(other), tensor)
    assert torch.equal(held.read_rows(name, start, stop), tensors[name][start:stop])
    info = held.tensors[name]
    row = info.nbytes // info.shape[0]
    place = info.start + start * row + int(where * (stop - start) * row)
    flip(folder / FILE, place, bit)
    says = f"tensor {name!r} in {folder / FILE} changed after it was hashed; {AGAIN}"
    for ask in (lambda: held.read_rows(name, start, stop), lambda: held.read(name)):
        assert refusal(ask) == says
    for other in tensors.keys() - {name}:
        held.read(other)
    flip(folder / FILE, place, bit)
    assert torch.equal(held.read_rows(name, start, stop), tensors[name][start:stop])


def test_whole_chunks_in_a_file_as_it_comes(tmp_path: Path) -> None:
    """With the chunks and the pieces in which files are read."""
    tensor = torch.arange(3 << 20).view(torch.int64)[: 5 << 17].view(-1, 1024)
    folder = folder_of(tmp_path / "m", {"a": tensor[:3].clone(), "b": tensor})
    held = Checkpoint.open(folder).sealed()
    assert torch.equal(held.read("b"), tensor)
    info = held.tensors["b"]
    flip(folder / FILE, info.start + info.nbytes - 1)
    assert torch.equal(held.read_rows("b", 0, 8), tensor[:8])
    assert "tensor 'b'" in refusal(lambda: held.read_rows("b", len(tensor) - 1, len(tensor)))


def test_tensors_that_share_bytes_and_empty_ones(tmp_path: Path) -> None:
    tensors = {"e": torch.zeros(0, 3), "a": torch.ones(9, 9), "z": torch.zeros(2, 0)}
    opened = Checkpoint.open(folder_of(tmp_path / "m", tensors))
    twice = {**opened.tensors, "head": replace(opened.tensors["a"], name="head")}
    held = replace(opened, tensors=twice).sealed()
    assert torch.equal(held.read("head"), held.read("a"))
    assert held.read("e").shape == (0, 3)
    held.require_unchanged()
    only = Checkpoint.open(folder_of(tmp_path / "n", {"e": torch.zeros(0, 3)})).sealed()
    assert only.read("e").shape == (0, 3)
    only.require_unchanged()


def other_header(folder: Path) -> None:
    """Two tensors of one size change their names: no byte of values does."""
    path = folder / FILE
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"x"').replace(b'"b"', b'"a"'))


def other_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "gemma"}')


def longer(folder: Path) -> None:
    with (folder / FILE).open("ab") as stream:
        stream.write(b"more")


def shorter(folder: Path) -> None:
    os.truncate(folder / FILE, (folder / FILE).stat().st_size - 4)


def cut_off(folder: Path) -> None:
    os.truncate(folder / FILE, 20)


def flipped(folder: Path) -> None:
    flip(folder / FILE, (folder / FILE).stat().st_size - 1)


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


PAIR = {"a": torch.ones(3, 4), "b": torch.zeros(3, 4)}


@pytest.mark.parametrize("change", [other_header, other_config, longer, shorter, cut_off])
def test_what_changed_before_it_was_hashed(tmp_path: Path, change: Any) -> None:
    """Headers and config.json were parsed by then."""
    folder = folder_of(tmp_path / "m", PAIR)
    opened = Checkpoint.open(folder)
    change(folder)
    name = "config.json" if change is other_config else FILE
    assert refusal(opened.sealed) == f"{folder / name} changed after it was opened; {AGAIN}"


@pytest.mark.parametrize(
    "change", [other_header, other_config, longer, shorter, cut_off, flipped, no_tokenizer]
)
def test_what_changed_after_it_was_hashed(tmp_path: Path, change: Any) -> None:
    folder = folder_of(tmp_path / "m", PAIR, **{"tokenizer.json": b'{"model": {}}'})
    held = Checkpoint.open(folder).sealed()
    held.require_unchanged()
    change(folder)
    said = refusal(held.require_unchanged)
    assert "after it was hashed" in said
    name = {other_config: "config.json", no_tokenizer: "tokenizer.json"}.get(change, FILE)
    assert str(folder / name) in said
    assert said.endswith(AGAIN)


def test_weights_are_read_again_only_where_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "m", PAIR)
    os.utime(folder / FILE, (1e9, 1e9))
    held = Checkpoint.open(folder).sealed()
    with monkeypatch.context() as patch:
        patch.setattr(seal, "pieces", lambda fd: pytest.fail("read"))
        held.require_unchanged()
    (folder / FILE).touch()
    held.require_unchanged()  # written, and the same
    flipped(folder)
    assert "tensor 'b'" in refusal(held.require_unchanged)


def test_a_write_in_the_same_tick_of_the_clock_is_found(tmp_path: Path) -> None:
    """A file that was written just before it was hashed may be written again at the same time."""
    folder = folder_of(tmp_path / "m", PAIR)
    held = Checkpoint.open(folder).sealed()
    before = (folder / FILE).stat()
    flipped(folder)
    os.utime(folder / FILE, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "tensor 'b'" in refusal(held.require_unchanged)


def test_what_is_gone_is_one_line(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", PAIR, **{"tokenizer.json": b"{}"})
    opened = Checkpoint.open(folder)
    held = opened.sealed()
    folder.rename(tmp_path / "gone")
    gone = "No such file or directory"
    asks: list[Callable[[], object]] = [
        *(lambda: held.read("a"), lambda: held.read_rows("b", 0, 1), held.require_unchanged),
        *(lambda: held.small.read("tokenizer.json"), opened.sealed, opened.sha256),
        *(opened.side_files, lambda: opened.skipped_files, lambda: opened.file_bytes),
        *(opened.side_hashes, lambda: Checkpoint.open(folder / "config.json" / "x")),
    ]
    for ask in asks[:-1]:
        assert refusal(ask) == f"cannot read {refused(ask)}: {gone}"
    assert "does not exist" in refusal(asks[-1])
    sizes = held.file_bytes, held.side_files(), held.skipped_files, held.side_hashes()
    assert sizes[0] == (tmp_path / "gone" / FILE).stat().st_size  # as it was


def refused(ask: Callable[[], object]) -> str:
    """The path that a refusal names."""
    return refusal(ask).removeprefix("cannot read ").partition(": ")[0]


def test_small_files_are_what_was_hashed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", PAIR, **{"tokenizer.json": b"{}", "vocab.json": b"[]"})
    held = Checkpoint.open(folder).sealed().small
    assert held.read("tokenizer.json") == b"{}"
    assert held.find("chat_template.jinja") is None
    with held.in_folder() as made:
        assert made != folder
        names = sorted(path.name for path in made.iterdir())
        assert names == ["config.json", "tokenizer.json", "vocab.json"]
    assert not made.exists()
    (folder / "chat_template.jinja").write_text("{{ x }}")
    assert refusal(lambda: held.find("chat_template.jinja")) == (
        f"{folder / 'chat_template.jinja'} came after the model was hashed; {AGAIN}"
    )
    (folder / "vocab.json").write_bytes(b"{}")
    said = f"{folder / 'vocab.json'} changed after it was hashed; {AGAIN}"
    assert refusal(lambda: held.read("vocab.json")) == said
    assert refusal(lambda: held.in_folder().__enter__()) == said
    (folder / "tokenizer.json").unlink()
    assert "cannot read" in refusal(lambda: held.find("tokenizer.json"))
    anything = SmallFiles(folder)
    assert anything.find("vocab.json") == b"{}"
    with anything.in_folder() as same:
        assert same == folder


def test_a_tokenizer_that_is_a_link_is_held_to_its_content(tmp_path: Path) -> None:
    """It is not carried over, but it is read."""
    folder = folder_of(tmp_path / "m", PAIR)
    (tmp_path / "elsewhere.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    held = Checkpoint.open(folder).sealed()
    assert held.side_hashes() == {}
    assert held.small.find("tokenizer.json") == b"{}"
    (tmp_path / "elsewhere.json").write_text("[]")
    assert "changed after it was hashed" in refusal(lambda: held.small.find("tokenizer.json"))


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "BOOL", "I64"])
def test_every_dtype(tmp_path: Path, dtype: str) -> None:
    tensor = torch.arange(40).remainder(2).to(TORCH_DTYPES[dtype])
    held = Checkpoint.open(folder_of(tmp_path / "m", {"t": tensor})).sealed()
    read = held.read_rows("t", 3, 37)
    assert torch.equal(read.view(torch.uint8), tensor[3:37].view(torch.uint8))
