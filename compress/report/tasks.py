"""Numbers of tasks as people read them: the rows of the page and of the terminal table."""

from collections.abc import Iterator
from dataclasses import dataclass

from compress.report import units
from compress.report.records.quality import TaskNumber, TaskQuality
from compress.report.schema import Report

_SHARES = ("acc", "acc_norm", "exact_match")


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One number of one task. before is None without a source; error, change and change_error are
    None where there is none."""

    task: str
    number: str
    items: int
    before: str | None
    after: str
    error: str | None
    change: str | None
    change_error: str | None

    @property
    def remark(self) -> str:
        """What stands beside it in the terminal: "acc_norm, −0.31 ±0.18"."""
        moved = self.change if self.change is not None else self.error and f"±{self.error}"
        wide = f" ±{self.change_error}" if self.change_error is not None else ""
        return f"{self.number}, {moved}{wide}" if moved else self.number


def rows(report: Report) -> Iterator[TaskRow]:
    """Tasks by name, each with its numbers by name."""
    tasks = {} if report.quality is None else report.quality.tasks
    for name, task in sorted(tasks.items()):
        for number, value in sorted(task.numbers.items()):
            yield _row(name, task, number, value)


def _row(name: str, task: TaskQuality, number: str, value: TaskNumber) -> TaskRow:
    share = number in _SHARES
    change = None if value.source is None else value.result - value.source
    return TaskRow(
        task=name,
        number=number,
        items=task.items,
        before=None if value.source is None else _value(value.source, share),
        after=_value(value.result, share),
        error=None if value.result_error is None else _width(value.result_error, share),
        change=None if change is None else _signed(change, share),
        change_error=None
        if value.difference_error is None
        else _width(value.difference_error, share),
    )


def _value(value: float, share: bool) -> str:
    return units.percent(value) if share else units.significant(value, 4)


def _width(error: float, share: bool) -> str:
    """In percentage points for a share."""
    return f"{100 * error:.1f}" if share else units.significant(error, 2)


def _signed(change: float, share: bool) -> str:
    sign = "+" if change > 0 else "−" if change < 0 else ""
    shown = f"{abs(100 * change):.1f}" if share else units.significant(abs(change))
    return f"{sign}{shown}"
