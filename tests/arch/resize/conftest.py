"""Tiny models of all families, read once a session."""

from collections.abc import Callable
from typing import Any

import pytest

from compress.arch.resize.config import resized
from compress.arch.resize.shape import Shape
from compress.errors import CheckpointError
from helpers.resizing.resized_models import Source, options_of, read


@pytest.fixture(scope="session")
def sources(tiny: Any) -> Callable[[str], Source]:
    made: dict[str, Source] = {}

    def get(family: str) -> Source:
        if family not in made:
            made[family] = read(tiny(family, **options_of(family)))
        return made[family]

    return get


@pytest.fixture
def refusal(sources: Any) -> Callable[[str, dict[str, Any], Shape], str]:
    """What is said of a shape, of a family's tiny model with some keys of config.json changed."""

    def said(family: str, config: dict[str, Any], shape: Shape) -> str:
        source = sources(family)
        with pytest.raises(CheckpointError) as refused:
            resized({**source.config, **config}, source.spec, shape)
        return str(refused.value)

    return said
