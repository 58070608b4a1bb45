"""Fixtures that every test folder uses."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from compress.cli.process import tune_process

# pytest finds fixtures by their names here.
from helpers.fixtures import _quick, answered_here, compressed, small_process, tiny  # noqa: F401

REPO = Path(__file__).resolve().parents[1]


def pytest_configure() -> None:
    """As a command line does, and as the first test of one would for all behind it."""
    tune_process()
    # What one test keeps another would find: those of the cache ask for a folder of their own.
    os.environ["COMPRESS_MODEL_CACHE"] = "0"


def _shared() -> Path | None:
    folder = REPO.parent / "shared"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with real models and texts beside the clone; skips where there is none."""
    folder = _shared()
    if folder is None:
        pytest.skip(f"needs the shared data folder {REPO.parent / 'shared'}, which is not here")
    return folder


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The embedded 6M-parameter model (bf16 llama, 6 blocks, tied embeddings)."""
    embedded = REPO / "examples" / "tale-6m"
    if (embedded / "model.safetensors").is_file():
        return embedded
    shared = _shared()
    if shared is None:
        pytest.skip(f"needs {embedded}, which is not here, nor is the shared data folder")
    return shared / "models" / "tale-6m"


@pytest.fixture(scope="session")
def matrix_row(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a row of the matrix of formats, each once for all loaders."""
    from helpers import matrix_cells

    return matrix_cells.maker(tmp_path_factory.mktemp("matrix"))


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that kill at many places: a killed process loses nothing that was not synced."""
    from compress.checkpoint import disk

    monkeypatch.setattr(disk, "fsync", lambda fd: None)


def tree_hashes(folder: Path) -> dict[str, str]:
    """Relative file name -> sha256 of all files below a folder, for byte-for-byte comparisons."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
