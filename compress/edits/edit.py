"""What an edit is: a change of the model itself, before any layer is rounded.

`plan` says without weights what config.json and the tensors will be, so that all later stages are
planned and refused before work. `apply` makes the tensors of one part from those of the source.
Neither knows of files, journals or recipes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from compress.arch.spec import BlockSpec
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.layout import Entry

Options = TypeVar("Options", contravariant=True)
Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Edited:
    """What an edit will leave: config.json, and name, dtype code and shape of every tensor, in file
    order. notes: what a person should know beside."""

    config: dict[str, Any]
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()


class Rows(NamedTuple):
    """Rows start.. of dimension 0 of a tensor of the result, in its dtype."""

    name: str
    start: int
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A block of the source, or what lies outside of the blocks (block: None).

    names: its tensors, in file order. whole: reads one. in_rows: reads one in runs of rows that
    bound memory, each with the row it begins at. All values are finite: others are a
    CheckpointError that names the tensor.
    """

    source: Outline
    block: BlockSpec | None
    names: tuple[str, ...]
    whole: Callable[[str], Tensor]
    in_rows: Callable[[str], Iterator[tuple[int, Tensor]]]


class PlanEdit(Protocol[Options]):
    """What becomes of a model; CheckpointError for one that the edit is not for."""

    def __call__(self, source: Outline, config: Options) -> Edited: ...


class ApplyEdit(Protocol[Options]):
    """The tensors of the result that come of a part, each from its first row to its last.

    CheckpointError, with the tensor's name, for values that cannot be what the edit makes of them.
    """

    def __call__(self, part: Part, config: Options) -> Iterator[Rows]: ...


class HeldBytes(Protocol[Options]):
    """Bytes of memory that `apply` holds at its worst moment, what it reads included.

    run: elements of the largest run of rows that `Part.in_rows` reads.
    """

    def __call__(self, source: Outline, config: Options, run: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Edit:
    """A row of EDITS; made by `row`, which checks that its functions go together.

    config: dataclass of the options that a stage may set. summary: one line for
    `compress-model recipes` and the docs.
    """

    config: type
    plan: PlanEdit[Any]
    apply: ApplyEdit[Any]
    held: HeldBytes[Any]
    summary: str


def row(
    config: type[Config],
    plan: PlanEdit[Config],
    apply: ApplyEdit[Config],
    held: HeldBytes[Config],
    summary: str,
) -> Edit:
    """A row of EDITS. `Edit` says what each is; here mypy holds all to one type of options."""
    return Edit(config, plan, apply, held, summary)
