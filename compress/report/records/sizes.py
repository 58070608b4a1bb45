"""What a search of sizes has measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SizeCandidate:
    """Sizes that a search has measured, and what they take of the budget's `measure`.

    loss: nats a token from the source, cut and repaired on few rows; predicted: the sum of what the
        axes lose alone, None for one of these. place: "chosen" or "".
    """

    sizes: dict[str, int]
    measure: str
    takes: int
    loss: float
    predicted: float | None = None
    place: str = ""
