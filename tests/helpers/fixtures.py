"""Tiny models made once a session, and runs that do not wait for disks or probes.

Fixtures import what they use: pytest-xdist's first process reads this file before it starts the
others, and would import torch (2.5 s) for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from compress.proof.question import Answer
    from compress.quant.scheme import QuantScheme

TinyModel = Callable[..., Path]

# Rooms whose tests are about the disk itself.
OWN = ("checkpoint",)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """tiny(family, **options of tiny_models.make): the folder; never write to it."""
    from helpers import tiny_models

    made: dict[str, Path] = {}

    def get(family: str, **options: object) -> Path:
        key = f"{family} {sorted(options.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = tiny_models.make(family, folder, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """compressed(family, scheme, **options of compressed_models.write): a folder in
    compressed-tensors, made once; never write to it. dtype is the source's."""
    from helpers import compressed_models, tiny_models
    from helpers.exporters.exports import SYM

    made: dict[Any, Path] = {}

    def write(family: str = "llama", scheme: QuantScheme = SYM, **options: Any) -> Path:
        key = family, scheme, tuple(sorted(options.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("export")
            dtype = options.pop("dtype", "bf16")
            source = tiny_models.make(family, folder / "source", tied=True, dtype=dtype)
            compressed_models.write(source, folder / "ct", scheme, **options)
            made[key] = folder / "ct"
        return made[key]

    return write


@pytest.fixture
def small_process(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if this process held 100 MB: sizes near what all tests so far have left in it round to
    more digits."""
    from compress.machine import memory

    folder = tmp_path_factory.mktemp("proc")
    (folder / "self").mkdir()
    (folder / "self" / "status").write_text("VmRSS:   100000 kB\n")
    monkeypatch.setattr(memory, "PROC", folder)


@pytest.fixture
def answered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fresh process is asked about a model is answered in this one, which need not start."""
    from compress.proof import loads, stock
    from compress.proof.question import Question

    def ask(path: Path, nbytes: int) -> Answer:
        return stock.answer_to(Question.read(path))

    monkeypatch.setattr(loads, "ask", ask)


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No probes of the machine's speed, and no waiting for the disk (but children do both)."""
    if request.path.parent.name in OWN or request.node.get_closest_marker("interop"):
        return
    from compress.checkpoint import disk
    from compress.plan import probes

    rates = probes.MachineRates(1e10, 1e10, 1e10, 1e8, 1e9)
    call = probes.ProbedCall(1e-4, 1e-4, 1e-4)
    monkeypatch.setattr(probes, "measure_rates", lambda dtype: rates)
    monkeypatch.setattr(probes, "probe", lambda make: call)
    monkeypatch.setattr(disk, "fsync", lambda fd: None)
