"""Tiny models made once a session, and a pipeline that does not wait for disks or probes."""

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_models
from compress.checkpoint import disk
from compress.pipeline import estimate

TinyModel = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """tiny(family, **options of tiny_models.make): the folder; never write to it."""
    made: dict[str, Path] = {}

    def get(family: str, **options: object) -> Path:
        key = f"{family} {sorted(options.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = tiny_models.make(family, folder, **options)
        return made[key]

    return get


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No probes of the machine's speed, and no waiting for the disk (but children do both)."""
    rates = estimate.Rates(1e10, 1e10, 1e10, 1e8, 1e9)
    monkeypatch.setattr(estimate, "measure_rates", lambda dtype: rates)
    monkeypatch.setattr(estimate, "least_seconds", lambda work: 1e-4)
    monkeypatch.setattr(disk, "fsync", lambda fd: None)
