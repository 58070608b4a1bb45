"""A clock around a function, for our runs and, imported from its folder, for the peers' scripts."""

import time
from collections.abc import Callable
from typing import Any

Spent = dict[str, float]


def clocked(function: Callable[..., Any], spent: Spent) -> Callable[..., Any]:
    """The function, adding up its calls and the seconds in them, on the wall and of all threads."""

    def call(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent["calls"] += 1
            spent["wall_s"] += time.perf_counter() - wall
            spent["cpu_s"] += time.process_time() - cpu

    return call
