"""What stands in for a block while transformers' model runs without its weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


class FirstReached(Exception):
    """The hidden states entering block 0 are on the tape; the rest need not run."""


class LastReached(Exception):
    """The arguments of every block are on the tape."""


class Tape:
    """What the recorders of one model wrote, and what they are to do.

    as_tuple: whether a block of this model returns (hidden,) or hidden.
    """

    def __init__(self) -> None:
        self.as_tuple = False
        self._calls: list[Call] = []
        self._first: Tensor | None = None
        self._replacement: Tensor | None = None
        self._recording = False
        self._stop_at_first = False

    @contextmanager
    def recording(self, stop_at_first: bool = False) -> Iterator[None]:
        """Write down calls, and stop the forward at the last block (or at the first)."""
        self._calls, self._first = [], None
        self._recording, self._stop_at_first = True, stop_at_first
        try:
            yield
        finally:
            self._recording = False

    @contextmanager
    def replacing(self, hidden: Tensor) -> Iterator[None]:
        """Let the last block return `hidden`, whatever came in."""
        self._replacement = hidden
        try:
            yield
        finally:
            self._replacement = None

    def take_calls(self) -> list[Call]:
        calls, self._calls, self._first = self._calls, [], None
        return calls

    def take_first(self) -> Tensor:
        assert self._first is not None, "the model never reached its first block"
        first, self._calls, self._first = self._first, [], None
        return first

    def visit(self, index: int, last: bool, hidden: Tensor, call: Call) -> Tensor:
        if self._recording:
            if self._stop_at_first:
                self._first = hidden
                raise FirstReached
            assert index == len(self._calls), "blocks run once each and in order"
            self._calls.append(call)
            if last:
                raise LastReached
        return self._replacement if last and self._replacement is not None else hidden


class Recorder(nn.Module):
    """Takes a block's place; attributes the model looks up are those of the block."""

    def __init__(self, block: nn.Module, index: int, last: bool, tape: Tape) -> None:
        super().__init__()
        self._place = (block, index, last, tape)  # in a tuple: not a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_place"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _, index, last, tape = self._place
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        out = tape.visit(index, last, hidden, (args, kwargs))
        return (out,) if tape.as_tuple else out
