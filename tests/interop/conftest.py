"""Loaders of other projects: skipped where missing, but not in CI, which promises to have them."""

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers import tiny_models


def _loader(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        message = f"needs {name} (pip install compress-model[interop]): {problem}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(scope="session")
def compressed_tensors() -> ModuleType:
    return _loader("compressed_tensors")


@pytest.fixture(scope="session")
def accelerate() -> ModuleType:
    return _loader("accelerate")


@pytest.fixture(scope="session")
def openvino() -> ModuleType:
    return _loader("openvino")


@pytest.fixture(scope="session")
def onnxruntime_genai() -> ModuleType:
    return _loader("onnxruntime_genai")


@pytest.fixture(scope="session")
def tensorrt_rtx() -> ModuleType:
    return _loader("tensorrt_rtx")


@pytest.fixture(scope="session")
def bitsandbytes() -> ModuleType:
    _loader("accelerate")
    return _loader("bitsandbytes")


@pytest.fixture(scope="session")
def lm_eval() -> ModuleType:
    _loader("accelerate")
    return _loader("lm_eval")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """Tiny checkpoints made so far, by family and options."""
    return {}


@pytest.fixture
def source(sources: dict[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(family: str = "llama", **options: Any) -> Path:
        key = (family, *sorted(options.items()))
        if key not in sources:
            sources[key] = tiny_models.make(family, tmp_path_factory.mktemp(family), **options)
        return sources[key]

    return make
