"""Attacks on all commands: each ends in time, with a result or with one line and nothing left.

`python -m attacks.again SEED`, in `tests/`, runs one of them again and keeps its files.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attacks import again, stock
from attacks.case import Case
from attacks.nursery import TESTS, Nursery, case_folder, nursery, sweep, try_case

BLOCK, BLOCKS = 40, 42
KEPT = json.loads((TESTS / "attacks" / "kept.json").read_text())  # seeds that once failed
ARGV = {
    "recipes": ["recipes"],
    "run": ["run", "recipe.yaml", "--model", "model", "--out", "out"],
}
RECIPE = "name: attack\nstages: [{method: rtn, scheme: W4A16, group_size: 32}]\n"


@pytest.fixture(scope="module")
def light() -> Iterator[Nursery]:
    with nursery(1, heavy=False) as found:
        yield found


@pytest.fixture(scope="module")
def heavy() -> Iterator[Nursery]:
    with nursery(again.WORKERS) as found:
        yield found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with case_folder() as folder:
        yield stock.make(folder)


def complaints(free: Nursery, plant: str = "", command: str = "recipes", **more: Any) -> str:
    """What the judge says of a command that does `plant` first."""
    zygote = free.get()
    with case_folder() as folder:
        here = folder / "0" / "here"
        (here / "model").mkdir(parents=True)
        (here / "model" / "config.json").write_text("{}")
        (here / "recipe.yaml").write_text(RECIPE)
        case = Case(0, "none", command, ARGV[command], here, plant=plant)
        found = try_case(zygote, replace(case, **more)).complaints
    free.put(zygote)
    return "\n".join(found)


def instead(code: str, command: str = "recipes") -> str:
    """A command that does something else, as lines of Python."""
    lines = code.replace("\n", "\n    ")
    return (
        "import os, sys, time, click\nfrom pathlib import Path\n"
        f"from compress.cli.commands import {command} as module\n"
        "from compress.errors import DataError\n"
        f"def other(**given):\n    {lines}\nmodule.command.callback = other\n"
    )


def test_a_good_command_has_no_complaints(light: Nursery) -> None:
    assert complaints(light) == ""
    assert complaints(light, sound=True) == ""


# What a command does -> what the judge must say.
PLANTED = {
    "1 / 0": "a traceback: ZeroDivisionError",
    "return 1": "exit code 1",
    "return 3": "exit code 3",
    "os.kill(os.getpid(), 11)": "signal 11",
    "raise OSError('broken')": "a traceback: OSError",
    "(lambda f: f(f))(lambda f: f(f))": "a traceback: RecursionError",
    "raise DataError('a\\nb' * 999)": "a refusal of",
    "click.echo('error: x', err=True); raise DataError('y')": "more than one line",
    "click.echo('sorry', err=True); return 2": "stderr ends with 'sorry'",
    "os.write(2, b'error: no line'); return 2": "stderr ends with ''",
    "Path('model/config.json').write_text('x')": "here/model/config.json was",
    "Path('model/config.json').unlink(); raise DataError('x')": "and is gone",
    "Path('stray').touch()": "left here/stray",
    "os.mkdir('../../stray')": "left or changed outside of its folder",
    "os.mkdir('out.partial'); raise DataError('x')": "left here/out.partial",
}


@pytest.mark.parametrize("code", PLANTED)
def test_the_judge_sees(code: str, light: Nursery) -> None:
    assert PLANTED[code] in complaints(light, instead(code))


def test_the_judge_sees_a_hang(light: Nursery) -> None:
    assert "it hangs" in complaints(light, instead("time.sleep(1000)"), sleep=0.5)


def test_the_judge_sees_work_without_an_end(light: Nursery) -> None:
    said = complaints(light, instead("while True: pass"), limits={"CPU": 1})
    assert "signal 24 ended it after" in said


def test_the_judge_sees_a_refusal_about_something_else(light: Nursery) -> None:
    plant = instead("raise DataError('bits is 99')")
    assert complaints(light, plant, names=["bits"]) == ""
    assert "names none of ['seed']" in complaints(light, plant, names=["seed"])


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('{\"x\": 1}')", ""),
        ("print('{\"x\": NaN}')", "stdout is not one JSON document: NaN is no JSON"),
        ("print('{} {}')", "stdout is not one JSON document"),
    ],
)
def test_the_judge_reads_json(code: str, said: str, light: Nursery) -> None:
    found = complaints(light, instead(code), argv=["recipes", "--json"])
    assert found.startswith(said)
    assert bool(found) == bool(said)


HALF = "os.mkdir('out'); Path('out/config.json').write_text('{}'); return 0"
JOURNAL = '{"passes": {"quantize": {"units": {}}}}'
LEFT = f"os.mkdir('out.partial'); Path('out.partial/journal.json').write_text('{JOURNAL}')"


def test_the_judge_opens_what_a_run_wrote(light: Nursery) -> None:
    assert "the result cannot be opened" in complaints(light, instead(HALF, "run"), "run")


def test_the_judge_sees_a_run_that_leaves_nothing_to_go_on_with(light: Nursery) -> None:
    plant = instead(f"{LEFT}; raise DataError('x')", "run")
    assert "left here/out.partial" in complaints(light, plant, "run")


def test_the_judge_goes_on_with_a_run_that_left_work(light: Nursery) -> None:
    work = LEFT.replace("{}", '{\\"start\\": 0, \\"0\\": 0}')
    plant = instead(f"if not given['resume']: {work}\nraise DataError('x')", "run")
    assert "--resume ends with 2" in complaints(light, plant, "run")


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, BLOCK * BLOCKS, BLOCK))
def test_many(first: int, heavy: Nursery, made: Path) -> None:
    check(list(range(first, first + BLOCK)), heavy, made)


@pytest.mark.long
def test_seeds_that_once_failed(heavy: Nursery, made: Path) -> None:
    check(KEPT, heavy, made)


def check(seeds: list[int], free: Nursery, made: Path) -> None:
    found = [str(v) for v in sweep(seeds, made, free, again.WORKERS) if v.complaints]
    assert not found, "\n\n".join(found)
