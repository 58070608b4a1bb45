"""The cache: what is found is what was kept, damage is noticed, the oldest go."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compress.checkpoint import disk
from compress.errors import RequestError
from compress.usercache import entry as entries
from compress.usercache.cache import UserCache, user_cache
from compress.usercache.entry import Entry
from compress.usercache.place import MOST_BYTES, SETTING, made_folder, most_bytes

SAID = "a text"


def of(seed: int, nbytes: int = 100, row: int = 1) -> tuple[Entry, bytes]:
    return Entry("text", {"seed": seed}, nbytes, row), bytes(
        (seed + i) % 256 for i in range(nbytes)
    )


def keep(cache: UserCache, seed: int, nbytes: int = 100) -> Path:
    entry, data = of(seed, nbytes)
    cache.keep(entry, lambda: [memoryview(data)])
    return cache.folder / entry.name


def found(cache: UserCache, seed: int, nbytes: int = 100, row: int = 1) -> bytes | None:
    taken = bytearray()
    whole = cache.find(of(seed, nbytes, row)[0], taken.extend, SAID)
    return bytes(taken) if whole else None


@pytest.fixture
def cache(tmp_path: Path) -> UserCache:
    return UserCache(tmp_path / "deep" / "made", 1_000_000)


def test_what_is_found_is_what_was_kept(cache: UserCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "PIECE", 64)  # several pieces, each of whole rows
    assert found(cache, 1) is None
    assert not cache.taken
    keep(cache, 1)
    assert found(cache, 1) == of(1)[1]
    assert found(cache, 2) is None
    assert list(cache.taken) == [SAID]
    assert cache.usage()[0] == 1


def test_pieces_hold_whole_rows(cache: UserCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "PIECE", 64)
    entry, data = of(3, 140, row=28)
    cache.keep(entry, lambda: [memoryview(data)])
    sizes: list[int] = []
    assert cache.find(entry, lambda piece: sizes.append(len(piece)), SAID)
    assert sizes == [56, 56, 28]


@pytest.mark.parametrize("place", [0, 30, 60, 153, 169])
def test_damage_is_noticed_and_removed(cache: UserCache, place: int) -> None:
    path = keep(cache, 1)
    held = bytearray(path.read_bytes())
    held[place] ^= 1
    path.write_bytes(held)
    assert found(cache, 1) is None
    assert not path.exists()
    keep(cache, 1)
    assert found(cache, 1) == of(1)[1]


@pytest.mark.parametrize("left", [0, 10, 100, 169])
def test_a_torn_file_is_damage(cache: UserCache, left: int) -> None:
    path = keep(cache, 1)
    os.truncate(path, left)
    assert found(cache, 1) is None
    assert not path.exists()


def test_another_entry_under_the_name_is_damage(cache: UserCache) -> None:
    path, other = keep(cache, 1), keep(cache, 2)
    os.rename(other, path)
    assert found(cache, 1) is None


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    cache = UserCache(tmp_path / "made", 5 * of(0)[0].file_bytes)
    paths = [keep(cache, seed) for seed in range(5)]
    for age, path in enumerate(paths):
        os.utime(path, (age, age))
    assert found(cache, 0) is not None  # so 1 is the oldest
    keep(cache, 5)
    assert [found(cache, seed) is not None for seed in range(6)] == [True, False, *[True] * 4]
    assert cache.usage()[1] <= cache.most


def test_what_would_fill_the_cache_is_not_kept(tmp_path: Path) -> None:
    cache = UserCache(tmp_path / "made", 1000)
    keep(cache, 1, 100)
    keep(cache, 2, 600)
    assert found(cache, 2, 600) is None
    assert found(cache, 1, 100) is not None


def test_nobody_else_can_read(cache: UserCache) -> None:
    before = os.umask(0)
    try:
        path = keep(cache, 1)
        assert path.stat().st_mode & 0o777 == 0o600
        assert cache.folder.stat().st_mode & 0o777 == 0o700
        os.chmod(cache.folder, 0o755)
        keep(cache, 2)
        assert cache.folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_link_is_not_followed(cache: UserCache, tmp_path: Path) -> None:
    path = keep(cache, 1)
    elsewhere = tmp_path / "elsewhere"
    os.rename(path, elsewhere)
    os.symlink(elsewhere, path)
    assert found(cache, 1) is None
    assert elsewhere.exists()


def test_a_disk_that_fails_ends_nothing(cache: UserCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "pwrite", full)
    keep(cache, 1)
    monkeypatch.undo()
    assert found(cache, 1) is None
    assert not [path for path in cache.folder.iterdir() if path.name != "lock"]


def test_a_folder_that_cannot_be_made_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = UserCache(tmp_path / "file" / "made", 1000)
    keep(cache, 1)
    assert found(cache, 1) is None
    assert cache.usage() == (0, 0)


WRITER = """
import os, sys
from pathlib import Path
from compress.usercache.cache import UserCache
from compress.usercache.entry import Entry
cache = UserCache(Path(sys.argv[1]), 40_000)
for turn in range(60):
    seed = turn % 12
    data = bytes((seed + i) % 256 for i in range(4096))
    entry, taken = Entry("text", {"seed": seed}, 4096), bytearray()
    if cache.find(entry, taken.extend, ""):
        assert taken == data
    cache.keep(entry, lambda: [memoryview(data)])
    assert cache.usage()[1] <= cache.most
"""


def test_two_processes_share_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "made")]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    for child in both:
        _, said = child.communicate(timeout=60)
        assert child.returncode == 0, said.decode()
    cache = UserCache(tmp_path / "made", 40_000)
    assert cache.usage()[0] == 40_000 // of(0, 4096)[0].file_bytes
    assert not list(cache.folder.glob(".*"))


def test_what_a_dead_process_left_goes(cache: UserCache) -> None:
    entry, data = of(1)

    def killed() -> Iterator[memoryview]:
        os._exit(1)
        yield memoryview(data)

    child = os.fork()
    if child == 0:
        cache.keep(entry, killed)
    os.waitpid(child, 0)
    assert list(cache.folder.glob(".*.tmp"))
    keep(cache, 2)
    assert not list(cache.folder.glob(".*.tmp"))


def test_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SETTING)
    assert made_folder() == tmp_path / "compress-model" / "made"
    assert most_bytes() == MOST_BYTES
    assert user_cache() == UserCache(made_folder(), MOST_BYTES)
    assert user_cache(False) is None
    monkeypatch.setenv(SETTING, "500MB")
    assert most_bytes() == 500_000_000
    monkeypatch.setenv(SETTING, "0")
    assert user_cache() is None
    assert user_cache(tmp_path) is not None  # a folder of its own is no user's cache
    monkeypatch.setenv(SETTING, "much")
    with pytest.raises(RequestError) as raised:
        user_cache()
    assert str(raised.value) == (
        "COMPRESS_MODEL_CACHE is 'much': it takes a size such as 5GB, 500MB or 2GiB, or 0 for no"
        " cache"
    )
