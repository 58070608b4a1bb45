"""What an edit is: a change of the model itself, before any layer is rounded.

`plan` says, without reading weights, what config.json and the tensors will be. So all later stages
are planned, or refused, before any work. `apply` makes the tensors of one part of the model.
Neither knows of files, journals or recipes. `source` is the model before the edit, which an earlier
edit may have left.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from compress.arch.spec import BlockSpec
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.dtype_codes import itemsize
from compress.checkpoint.shards.layout import Entry
from compress.edits.learned import BySite, ChangeLinear, FindSites, Neutral
from compress.edits.narrowing import ByBasis, ChooseKind

Options = TypeVar("Options", contravariant=True)
Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Edited:
    """The model that an edit will leave.

    config: its config.json. entries: name, dtype code and shape of every tensor, in file order.
    notes: lines that a user should read. blocks: indices of the source's blocks that stay; None
    for all. stream: what the residual stream is multiplied by.
    """

    config: dict[str, Any]
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
    blocks: tuple[int, ...] | None = None
    stream: float = 1.0


class Rows(NamedTuple):
    """A run of rows of one tensor that the edit leaves.

    start: index of the first row, along dimension 0. values: [rows, ...] in the tensor's dtype; a
    tensor without dimensions comes whole.
    """

    name: str
    start: int
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One block of the source, or all that lies outside of its blocks (block: None).

    names: its tensors, in file order. whole: reads a tensor by its name. in_rows: reads a tensor in
    runs of rows, to bound memory; yields the index of each run's first row, and the run. Both raise
    a CheckpointError that names the tensor for a value that is not finite.
    """

    source: Outline
    block: BlockSpec | None
    names: tuple[str, ...]
    whole: Callable[[str], Tensor]
    in_rows: Callable[[str], Iterator[tuple[int, Tensor]]]


def copied(part: Part) -> Iterator[Rows]:
    """Every tensor of a part as it is."""
    for name in part.names:
        for start, rows in part.in_rows(name):
            yield Rows(name, start, rows)


def copied_bytes(source: Outline, run: int) -> int:
    """Bytes of one run of rows. run: its elements at most."""
    return run * max(itemsize(info.dtype) for info in source.tensors.values())


class PlanEdit(Protocol[Options]):
    """What the edit will leave of a model; CheckpointError for a model that it cannot change."""

    def __call__(self, source: Outline, config: Options) -> Edited: ...


class ApplyEdit(Protocol[Options]):
    """The tensors that the edit makes of a part, each from its first row to its last.

    CheckpointError, with the tensor's name, for values that the edit cannot change without a loss
    that it refuses.
    """

    def __call__(self, part: Part, config: Options) -> Iterator[Rows]: ...


class HeldBytes(Protocol[Options]):
    """Most bytes of memory that `apply` holds at a time, including what it reads.

    run: elements of the largest run of rows that `Part.in_rows` reads.
    """

    def __call__(self, source: Outline, config: Options, run: int) -> int: ...


@dataclass(frozen=True, slots=True)
class ByTensor:
    """The functions of an edit that changes tensors by themselves, without data."""

    apply: ApplyEdit[Any]
    held: HeldBytes[Any]


@dataclass(frozen=True, slots=True)
class ByConfig:
    """An edit of config.json alone: every tensor is copied. Data is looked at only to choose what
    config.json shall say, where the options leave that open."""


@dataclass(frozen=True, slots=True)
class ByTraining:
    """An edit that trains the model by the one that the run was given."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A row of EDITS. Make it by `row` or by `learned_row`, whose types hold its functions to one
    type of options.

    config: dataclass of the options that a stage may set. work: how its pass is carried out.
    summary: one line for `compress-model recipes` and the docs.
    """

    config: type
    plan: PlanEdit[Any]
    work: ByTensor | ByConfig | BySite | ByBasis | ByTraining
    summary: str

    @property
    def needs_data(self) -> bool:
        """Whether its pass looks at calibration data."""
        return not isinstance(self.work, ByTensor | ByConfig)

    @property
    def changes_class(self) -> bool:
        """Whether it may leave what only a stock class can show to be right."""
        return not isinstance(self.work, ByTensor)


def row(
    config: type[Config],
    plan: PlanEdit[Config],
    apply: ApplyEdit[Config],
    held: HeldBytes[Config],
    summary: str,
) -> Edit:
    """Make a row of an edit by tensor; `Edit` and `ByTensor` say what the arguments are.

    A function, because mypy checks here that all take the same type of options.
    """
    return Edit(config, plan, ByTensor(apply, held), summary)


def learned_row(
    config: type[Config],
    plan: PlanEdit[Config],
    sites: FindSites[Config],
    change: ChangeLinear[Config],
    neutral: Neutral[Config],
    summary: str,
) -> Edit:
    """Make a row of an edit that looks at data; `Edit` and `BySite` say what the arguments are."""
    return Edit(config, plan, BySite(sites, change, neutral), summary)


def narrowing_row(
    config: type[Config],
    plan: PlanEdit[Config],
    kind: ChooseKind[Config],
    summary: str,
) -> Edit:
    """Make a row of an edit that narrows the residual stream; `Edit` and `ByBasis` say what the
    arguments are."""
    return Edit(config, plan, ByBasis(kind), summary)
