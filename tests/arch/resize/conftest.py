"""Tiny models of all families, read once a session."""

from collections.abc import Callable
from typing import Any

import pytest

from helpers.resizing.resized_models import Source, options_of, read


@pytest.fixture(scope="session")
def sources(tiny: Any) -> Callable[[str], Source]:
    made: dict[str, Source] = {}

    def get(family: str) -> Source:
        if family not in made:
            made[family] = read(tiny(family, **options_of(family)))
        return made[family]

    return get
