"""Runs cases in zygotes: two of them beside each other, each with one case at a time."""

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attacks import cases, judge, rights
from attacks.case import Case, Outcome

TESTS = Path(__file__).resolve().parents[1]
REPO = TESTS.parent


class Zygote:
    """A `zygote` process; `heavy` has imported torch and all else."""

    def __init__(self, heavy: bool) -> None:
        roots = [TESTS, REPO, *(REPO / name for name in ("calibration", "exporters", "kernels"))]
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COLUMNS"))},
            "PYTHONPATH": ":".join(map(str, roots)),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "attacks.zygote", *(["heavy"] if heavy else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            text=True,
        )
        assert self._answer() == {}

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the zygote died"
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, case: Case) -> Outcome:
        if case.user == rights.OTHER:
            rights.hand_over(case.folder.parent)
        assert self._process.stdin is not None
        self._process.stdin.write(case.job() + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return Outcome(**{**answer, "strays": tuple(answer["strays"])})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class Verdict:
    """complaints: what it did that no command may do; none for a good one."""

    case: Case
    outcome: Outcome
    complaints: tuple[str, ...]

    def __str__(self) -> str:
        told = self.outcome.err.strip()
        told = told if len(told) < 700 else f"{told[:150]} ... {told[-500:]}"
        lines = [f"seed {self.case.seed}, {self.case.command}, {self.case.trouble}"]
        lines += [f"  complaint: {line}" for line in self.complaints]
        return "\n".join([*lines, f"  {self.case.shell()[:600]}", f"  stderr: {told}"])


Nursery = queue.SimpleQueue[Zygote]  # those that are free


def try_case(zygote: Zygote, case: Case) -> Verdict:
    """Run a case and judge it; where it leaves work to go on with, go on without the trouble."""
    base = case.folder.parent
    before = judge.snapshot(base)
    outcome = zygote.run(case)
    after = judge.snapshot(base)
    found = list(judge.complaints(case, outcome, before, after))
    if judge.left_work(case, before, after) and not found:
        again = replace_trouble(case)
        ended = zygote.run(again)
        if ended.status != 0:
            found.append(f"--resume ends with {ended.status}: {ended.err.strip()[-300:]}")
        else:
            found += judge.complaints(again, ended, before, judge.snapshot(base))
    return Verdict(case, outcome, tuple(found))


def replace_trouble(case: Case) -> Case:
    """The same command with --resume and nothing in its way."""
    argv = [word for word in case.argv if word not in ("--resume", "--dry-run")]
    streams = {"stdin": "null", "stdout": "file", "stderr": "file"}
    nothing = {"limits": {}, "full_at": None, "interrupt": None, "sound": True, "names": []}
    return replace(case, argv=[*argv, "--resume"], **streams, **nothing)  # type: ignore[arg-type]


@contextmanager
def nursery(number: int, heavy: bool = True) -> Iterator[Nursery]:
    """So many zygotes, to be taken and put back."""
    free: Nursery = queue.SimpleQueue()
    made = [Zygote(heavy) for _ in range(number)]
    for zygote in made:
        free.put(zygote)
    try:
        yield free
    finally:
        for zygote in made:
            zygote.close()


def sweep(seeds: Iterable[int], stock: Path, free: Nursery, workers: int) -> Iterator[Verdict]:
    """The verdict of each seed, in order."""

    def one(seed: int) -> Verdict:
        zygote = free.get()
        try:
            with case_folder() as folder:
                return try_case(zygote, cases.draw(seed, stock, folder))
        finally:
            free.put(zygote)

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(one, seeds)


@contextmanager
def case_folder() -> Iterator[Path]:
    """A folder that a plain user can reach, removed with all that a case left in it."""
    folder = Path(tempfile.mkdtemp(prefix="attack-")).resolve()
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        _open_up(folder)
        shutil.rmtree(folder)


def _open_up(folder: Path) -> None:
    """Let what a case closed be removed."""
    for root, folders, _ in os.walk(folder):
        for path in (Path(root, name) for name in folders):
            if not path.is_symlink():
                path.chmod(0o700)
