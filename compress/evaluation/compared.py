"""The models of an evaluation."""

from dataclasses import dataclass

from compress.formats import Weights


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """A result, and the source that it is measured against, where there is one.

    plain: the source plainly rounded, measured on the same texts beside the result; it has no part
    in tasks and samples. plain_reason: why a result that was rounded has none.
    """

    result: Weights
    source: Weights | None = None
    plain: Weights | None = None
    plain_reason: str | None = None

    @property
    def origin(self) -> Weights:
        """What the result was made from, or itself."""
        return self.source or self.result

    @property
    def models(self) -> tuple[Weights, ...]:
        """Source first, as they are measured."""
        return (self.result,) if self.source is None else (self.source, self.result)
