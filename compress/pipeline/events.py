"""What a long run tells whoever watches it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One step of the work is done.

    stage: what is going on ("calibrate", "quantize", "evaluate source", ...).
    unit: what was just finished ("block 3"), index of total; seconds it took.
    """

    stage: str
    unit: str
    index: int
    total: int
    seconds: float
    message: str = ""


Progress = Callable[[Event], None]


def silent(event: Event) -> None:
    """The default listener."""
