"""What a rule of the lint finds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from compress_exporters.tensorrt.lint.facts import Facts


@dataclass(frozen=True, slots=True)
class Finding:
    """at: the node, the value or the file. what: what is wrong. remedy: what to do instead."""

    at: str
    what: str
    remedy: str


Rule = Callable[[Facts], Iterator[Finding]]
