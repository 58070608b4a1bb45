"""Random changes of a valid checkpoint never give a traceback or a silently wrong weight."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzzing import KINDS, SIDE_FILES, WEIGHTS, Sound, config_of, copy_into, examine
from mutations import mutate_file, mutate_json

Check = Callable[[st.DataObject], None]
TARGETS = ("dense", "compressed-tensors", "gptq_v2")  # to export to


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sound]:
    made: dict[str, Sound] = {}

    def get(kind: str) -> Sound:
        if kind not in made:
            made[kind] = Sound.make(kind, tmp_path_factory.mktemp(kind) / "model")
        return made[kind]

    return get


def change_config(data: st.DataObject, folder: Path) -> None:
    """One to three changes of config.json, or of a file that repeats it for some loaders."""
    found = [name for name in SIDE_FILES if (folder / name).exists()]
    name = data.draw(st.sampled_from(["config.json", "config.json", *found]))
    config = config_of(folder) if name == "config.json" else json.loads((folder / name).read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        mutate_json(data, config)
    (folder / name).write_text(json.dumps(config))


def change_header(data: st.DataObject, folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(mutate_file(data, path.read_bytes()))


CHANGES = {"config": change_config, "header": change_header}


def run(kind: str, change: str, sound: Sound, folder: Path, examples: int, fixed: bool) -> None:
    """Try that many changes; most must be refused, and some must not."""
    found: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=fixed,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
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
    run(kind, change, sound(kind), tmp_path / "model", 20, fixed=True)


@pytest.mark.long
@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_many_changes(
    kind: str, change: str, sound: Callable[[str], Sound], tmp_path: Path
) -> None:
    run(kind, change, sound(kind), tmp_path / "model", 1500, fixed=False)
