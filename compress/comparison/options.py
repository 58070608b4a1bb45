"""What a comparison is asked for."""

from dataclasses import dataclass

from compress.errors import RequestError
from compress.report.comparison.records import Wanted


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """runtime: that results are for, "vllm", "llama.cpp", ... None for any. text: a file that all
    are measured on; None for what the recipes say. max_tokens: of it.

    within: bytes that the winner may take. kl: nats a token that it may lose. fastest: of those
    that fit the fastest wins. resume: go on with a comparison that was stopped. trainings: built-in
    recipes that train the model run, too.
    """

    runtime: str | None = None
    text: str | None = None
    max_tokens: int | None = None
    within: int | None = None
    kl: float | None = None
    fastest: bool = False
    resume: bool = False
    trainings: bool = False

    def __post_init__(self) -> None:
        """RequestError for limits that are none."""
        if self.within is not None and self.within < 1:
            raise RequestError(f"within is {self.within}; it is 1 byte or more")
        if self.kl is not None and not self.kl > 0:
            raise RequestError(f"kl is {self.kl}; it is a number of nats a token above 0")
        if self.max_tokens is not None and self.text is None:
            raise RequestError("max_tokens is of a text, and there is none; give --text")

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.runtime, self.within, self.kl, self.fastest)
