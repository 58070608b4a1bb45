"""Random changes of a valid checkpoint never give a traceback or a silently wrong weight."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.formats import CODECS
from helpers.fuzzing import KINDS, Sound, copy_into, examine, tries
from helpers.mutations import change_config, change_header

TARGETS = (*CODECS, "dense", "compressed-tensors")  # to export to


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sound]:
    made: dict[str, Sound] = {}

    def get(kind: str) -> Sound:
        if kind not in made:
            made[kind] = Sound.make(kind, tmp_path_factory.mktemp(kind) / "model")
        return made[kind]

    return get


CHANGES = {"config": change_config, "header": change_header}


def run(kind: str, change: str, sound: Sound, folder: Path, examples: int, fixed: bool) -> None:
    """Try that many changes; most must be refused, and some must not."""
    found: Counter[str] = Counter()

    @tries(examples, fixed)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        copy_into(sound, folder)
        CHANGES[change](data, folder)
        found[examine(folder, sound, data.draw(st.sampled_from(TARGETS)))] += 1

    check()
    print(kind, change, dict(found))
    assert found["refused"]


@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_changes(kind: str, change: str, sound: Callable[[str], Sound], tmp_path: Path) -> None:
    run(kind, change, sound(kind), tmp_path / "model", 8, fixed=True)


@pytest.mark.long
@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_many_changes(
    kind: str, change: str, sound: Callable[[str], Sound], tmp_path: Path
) -> None:
    run(kind, change, sound(kind), tmp_path / "model", 1500, fixed=False)
