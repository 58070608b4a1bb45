"""Loaders of other projects: skipped where missing, but not in CI, which promises to have them."""

import importlib
import os
from types import ModuleType

import pytest


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
