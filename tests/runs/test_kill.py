"""Real processes, really killed: the command line on the demo model."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from conftest import tree_hashes
from helpers import forked
from helpers.short_runs import recipe_file

GPTQ = {"method": "gptq", "scheme": "W4A16", "group_size": 64}
CUT = {"method": "prune_width", "ffn": 24}
LATENT = {"method": "mla", "rank": 24, "rope_dim": 8}
WINDOWS = {"method": "hybrid", "window": 8, "global": 1}
DISTILL = {"method": "distill", "tokens": 1280, "batch": 2, "every": 8, "length": 8}
DATA = {"sources": "self", "samples": 8, "length": 32}


class Job:
    """One recipe on one model, run as often as wanted in processes of their own."""

    def __init__(self, model: Path, folder: Path, *stages: Mapping[str, Any]) -> None:
        self.model, self.folder = model, folder
        self.recipe = recipe_file(folder, *(stages or (GPTQ,)), calibration=DATA)

    def words(self, out: str, *options: str) -> list[str]:
        words = ["run", str(self.recipe), "--model", str(self.model)]
        return [*words, "--out", str(self.folder / out), *options]

    def finish(self, out: str, *options: str) -> dict[str, str]:
        """Run to the end: hashes of everything but the report."""
        child = forked.start(self.words(out, *options))
        child.join(timeout=300)
        assert child.exitcode == 0
        found = tree_hashes(self.folder / out)
        return {k: v for k, v in found.items() if not k.startswith("report/")}

    def wait_for_unit(self, out: str, count: int, alive: Callable[[], bool]) -> bool:
        """Wait until so many units are recorded; False when the process ended before."""
        journal = self.folder / f"{out}.partial" / "journal.json"
        while alive():
            try:
                passes = json.loads(journal.read_text())["passes"].values()
                if sum(len(part["units"]) for part in passes) >= count:
                    return True
            except FileNotFoundError:
                pass
            time.sleep(0.002)
        return False

    def kill(self, out: str, chance: random.Random) -> bool:
        """Start or resume a run and kill it somewhere; False when it was faster."""
        resumed = (self.folder / f"{out}.partial" / "journal.json").exists()
        child = forked.start(self.words(out, *(["--resume"] if resumed else [])))
        if self.wait_for_unit(out, chance.randrange(1, 11), child.is_alive):
            time.sleep(chance.uniform(0, 0.1))
        child.kill()
        child.join()
        return child.exitcode == -signal.SIGKILL


def killed_again_and_again(job: Job, kills: int, seed: int) -> None:
    """Each killed process goes on where the one before was killed; one that is done starts anew."""
    whole, chance = job.finish("whole"), random.Random(seed)
    done = 0
    while done < kills:
        done += job.kill("out", chance)
        if (job.folder / "out").exists():
            assert_equal(job, whole)
            shutil.rmtree(job.folder / "out")
    left = [p for p in job.folder.iterdir() if p.name in ("out.partial", "out.publishing")]
    job.finish("out", *(["--resume"] if left else []))
    assert_equal(job, whole)


def assert_equal(job: Job, whole: dict[str, str]) -> None:
    found = tree_hashes(job.folder / "out")
    assert {k: v for k, v in found.items() if not k.startswith("report/")} == whole
    assert not (job.folder / "out.partial").exists()


def test_a_real_kill(demo_model: Path, tmp_path: Path) -> None:
    killed_again_and_again(Job(demo_model, tmp_path), 1, seed=1)


@pytest.mark.long
def test_twenty_real_kills(demo_model: Path, tmp_path: Path) -> None:
    killed_again_and_again(Job(demo_model, tmp_path), 20, seed=2)


@pytest.mark.long
def test_fifty_real_kills_while_width_goes_and_what_is_left_is_trained(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """At any moment of the structural stages, whose units are blocks, and steps of a training."""
    model = tiny("llama", num_hidden_layers=3)
    killed_again_and_again(Job(model, tmp_path, CUT, DISTILL), 50, seed=3)


@pytest.mark.long
@pytest.mark.parametrize("stages", [(LATENT, DISTILL), (WINDOWS,)], ids=["mla", "hybrid"])
def test_fifty_real_kills_while_the_cache_gets_smaller(
    tiny: Callable[..., Path], tmp_path: Path, stages: tuple[Mapping[str, Any], ...]
) -> None:
    """At any moment of making latents, and of measuring which layers get a window."""
    model = tiny("llama", num_hidden_layers=3, num_key_value_heads=4)
    killed_again_and_again(Job(model, tmp_path, *stages), 50, seed=4)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_says_how_to_resume(
    demo_model: Path, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    """Ctrl-C, and what a scheduler sends."""
    job, heard = Job(demo_model, tmp_path), tmp_path / "said"
    child = forked.start_heard(job.words("out"), heard)
    assert job.wait_for_unit("out", 2, child.is_alive), heard.read_text()
    assert child.pid is not None
    os.kill(child.pid, sent)
    child.join(timeout=60)
    said = heard.read_text()
    assert child.exitcode == code, said
    assert "Traceback" not in said
    assert f"lies in {tmp_path / 'out.partial'}. To go on:" in said
    line = next(line for line in said.splitlines() if line.strip().startswith("compress-model"))
    assert line.split()[:2] == ["compress-model", "run"]
    assert line.split()[-1] == "--resume"
    assert not (tmp_path / "out").exists()
    child = forked.start_heard(job.words("out"), heard)
    child.join(timeout=60)
    said = heard.read_text()
    assert child.exitcode == 2
    assert "is left from a run that was stopped; remove it to start again, or add --resume" in said
    assert "Traceback" not in said
