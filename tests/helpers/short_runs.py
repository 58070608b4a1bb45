"""Short runs on tiny models: recipes in one line, models made once."""

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.recipe import Recipe
from compress.recipe.reading.parse import parse
from compress.verbs import RunOptions, run
from conftest import tree_hashes
from helpers import faults

W4 = {"scheme": "W4A16", "group_size": 32}
RTN: Mapping[str, Any] = {"method": "rtn", **W4}
GPTQ: Mapping[str, Any] = {"method": "gptq", **W4}
SELF = {"sources": "self", "samples": 4, "length": 16}
WHOLE = {"rank": 1.0, "rope_dim": 1.0}  # of a latent: nothing is lost
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
LEFTOVERS = ("out.partial", "out.publishing", "out.replaced")
WORDS = "once upon a time a small dog and an old cat sat by the door in the rain . "


def mla(**options: Any) -> dict[str, Any]:
    return {"method": "mla", **options}


def recipe(*stages: Mapping[str, Any], **rest: Any) -> Recipe:
    """A recipe of these stages, through the parser as a user's would be."""
    content = {"name": "test", "stages": [dict(stage) for stage in stages], **rest}
    return parse(yaml.safe_dump(content))


def recipe_file(folder: Path, *stages: Mapping[str, Any], **rest: Any) -> Path:
    """The same as a file."""
    path = folder / "recipe.yaml"
    content = {"name": "test", "stages": [dict(stage) for stage in stages], **rest}
    path.write_text(yaml.safe_dump(content))
    return path


def text_source(folder: Path, samples: int = 4, length: int = 16) -> dict[str, Any]:
    """A calibration on a text file of `folder`, quicker than sampling."""
    path = folder / "words.txt"
    if not path.exists():
        path.write_text("".join(WORDS[i:] + WORDS[:i] for i in range(0, 60, 3)))
    return {"sources": [{"text": str(path)}], "samples": samples, "length": length}


def result_of(out: Path) -> dict[str, str]:
    """Hashes of everything but the report, which has times in it."""
    return {k: v for k, v in tree_hashes(out).items() if not k.startswith("report/")}


def go_on(asked: Recipe, source: Path, out: Path) -> None:
    """What a person does after a kill: --resume where there is something, else run again."""
    if any((out.parent / name).is_dir() and any((out.parent / name).iterdir())
           for name in LEFTOVERS):  # fmt: skip
        run(asked, source, out, options=RunOptions(resume=True))
    elif not (out / "config.json").exists():
        run(asked, source, out)


def kill_and_go_on(
    asked: Recipe, source: Path, folder: Path, number: int, effect: faults.Effect
) -> dict[str, str]:
    """The result of a run that was killed at one operation and resumed."""
    folder.mkdir()
    out = folder / "out"
    with pytest.raises(faults.Killed), faults.fault_at(number, effect):
        run(asked, source, out)
    if out.exists():
        assert (out / "report" / "report.json").exists(), "something unfinished looks finished"
    go_on(asked, source, out)
    found = result_of(out)
    assert [p.name for p in folder.iterdir()] == ["out"]
    shutil.rmtree(folder)
    return found


def killed_at(first: int, step: int) -> pytest.MarkDecorator:
    """Parameters of `kill_at_each_fifth`: a sample, "some", and all fifths one after the other."""
    some = pytest.param(first, step, id="some")
    return pytest.mark.parametrize(("first", "step"), [some, *((i, 5) for i in range(5))])


def kill_at_each_fifth(
    asked: Recipe, source: Path, folder: Path, first: int, step: int = 5
) -> Counter[str]:
    """Kill a run at operation `first` and each fifth (or `step`th) behind it, compare the results;
    what was killed."""
    with faults.counting() as calls:
        run(asked, source, folder / "whole")
    whole, killed = result_of(folder / "whole"), Counter[str]()
    assert whole
    for number, name in enumerate(calls.names):
        if number % step != first:
            continue
        effects: tuple[faults.Effect, ...] = ("before", "torn") if name == "pwrite" else ("before",)
        for effect in effects:
            found = kill_and_go_on(asked, source, folder / f"{number}-{effect}", number, effect)
            assert found == whole, (number, name, effect)
            killed[name] += 1
    return killed
