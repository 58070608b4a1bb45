"""Paths that can be, and files that have an end."""

import errno
import os
import socket
from pathlib import Path

import pytest

from compress.checkpoint import disk, jsonfile, prepare_output, reading, regular
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.regular import open_regular, read_lines, read_regular, usable
from compress.errors import CheckpointError, OutputError


def special(folder: Path) -> dict[str, Path]:
    """What is no file, each with a word of the reason."""
    os.mkfifo(folder / "fifo")
    here = os.open(folder, os.O_RDONLY)
    try:  # the address of a socket has about 100 characters at most
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/socket")
    finally:
        os.close(here)
    (folder / "link").symlink_to("/dev/zero")
    found = {name: folder / name for name in ("fifo", "socket", "link")}
    return {"a folder": folder, "a pipe": found["fifo"], "a socket": found["socket"]} | {
        "a device": found["link"]
    }


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    for word, path in special(tmp_path).items():
        for reads in (open_regular, lambda x: read_regular(x, 10), lambda x: list(read_lines(x))):
            with pytest.raises(OSError, match=f"it is {word}"):
                reads(path)  # type: ignore[operator]


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one\ntwo\n" + b"x" * 20)
    monkeypatch.setattr(regular, "_LINE", 21)
    assert list(read_lines(file)) == [b"one\n", b"two\n", b"x" * 20]
    assert read_regular(file, 28) == file.read_bytes()
    with pytest.raises(OSError, match="it has more than 27 bytes"):
        read_regular(file, 27)
    monkeypatch.setattr(regular, "_LINE", 20)
    with pytest.raises(OSError, match="a line has 20 bytes or more"):
        list(read_lines(file))


def test_a_checkpoint_of_special_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is not a file"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="/dev/zero is no folder"):
        Checkpoint.open("/dev/zero")


def test_half_characters_in_json(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "\\ud800"}')
    with pytest.raises(CheckpointError, match=r"is not valid JSON: .*surrogates"):
        jsonfile.read_object(file)
    file.write_text('{"model_type": "\\ud83d\\ude00"}')
    assert jsonfile.read_object(file) == {"model_type": "\U0001f600"}


LONG = "n" * 256
PATHS = [
    ("", "'': a path is needed"),
    ("  ", "'  ': a path is needed"),
    ("a\0b", r"'a\x00b': no path has a zero byte"),
    (f"a/{LONG}/b", "a name in it has 256 bytes; 255 are possible"),
    ("ä" * 128, "a name in it has 256 bytes; 255 are possible"),
    ("a/" * 2048, "it has 4096 bytes; 4095 are possible"),
    ("loop", "'loop': its links lead in a circle; mend them"),
    ("loop/inside", "'loop/inside': its links lead in a circle; mend them"),
    ("caf\udce9", r"'caf\udce9': its name is not UTF-8; rename it"),
    ("alias", "whose name is not UTF-8; rename that"),
]


@pytest.mark.parametrize(("path", "said"), PATHS, ids=range(len(PATHS)))
def test_paths_that_nothing_can_be_at(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("alias").symlink_to("caf\udce9")
    with pytest.raises(OutputError) as caught:
        usable(path, "out", OutputError)
    assert str(caught.value).startswith("out is ")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300
    with pytest.raises(OutputError):
        prepare_output(path)


@pytest.mark.parametrize("path", ["x" * 244, "ä/ö", "with space", "~", "a\nb"])
def test_paths_that_can_be(path: str) -> None:
    assert usable(path, "out", OutputError) == Path(path)


def test_a_folder_needs_names_for_the_folders_beside_it(tmp_path: Path) -> None:
    prepare_output(tmp_path / ("x" * 244))
    with pytest.raises(OutputError, match="a name in it has 256 bytes"):
        prepare_output(tmp_path / ("x" * 245))


def test_a_lack_of_handles_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(path: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(reading, "read_regular", lambda path, most: none_left(path))
    with pytest.raises(OSError, match="Too many open files"):
        jsonfile.read_object(tmp_path / "config.json")


def test_cleaning_up_needs_no_handle_but_the_spare_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "made"
    (folder / "inside").mkdir(parents=True)
    (folder / "inside" / "file").touch()
    handles = os.listdir("/proc/self/fd")
    with disk.spare_handle():
        assert len(os.listdir("/proc/self/fd")) == len(handles) + 1
        disk.remove_tree(folder)
        assert len(os.listdir("/proc/self/fd")) == len(handles)
    assert not folder.exists()
