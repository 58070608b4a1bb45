"""What a stage that changes the structure took from each linear, and how well the rest was
refitted: a line for the terminal, and a table for the page."""

from collections.abc import Sequence

from compress.report import units
from compress.report.markup import Html
from compress.report.parts import Cell, Column, number, section, table
from compress.report.schema import LinearRepair, Report, StageRecord

NOTE = (
    "Missed is the share of the energy of what a linear should give beside what it keeps of the"
    " source that it does not give, on calibration rows that no fit saw: the others were fitted."
)


def repairs(report: Report) -> Html | None:
    """A table of all linears of all such stages; None without."""
    rows = [_row(stage, x) for stage in report.stages for x in stage.repairs]
    if not rows:
        return None
    columns = [
        *(Column("Stage"), Column("Linear"), Column("Kept", True), Column("Penalty", True)),
        *(Column("Missed, cut", True), Column("Missed, refitted", True), Column("Note")),
    ]
    return section("repairs", "Structure", table("Structure", columns, rows), note=NOTE)


def _row(stage: StageRecord, repair: LinearRepair) -> list[Cell]:
    def share(value: float | None) -> Cell:
        return number(value, None if value is None else units.percent(value))

    penalty = repair.penalty
    return [
        Cell(stage.name),
        Cell(repair.linear),
        Cell(f"{repair.kept} of {repair.of}"),
        number(penalty, None if penalty is None else units.significant(penalty)),
        share(repair.before),
        share(repair.after),
        Cell(repair.note),
    ]


def repaired(stage: StageRecord) -> str | None:
    """One line about a stage: "24 linears, of what they should give 8.2 % was missed, 2.1 %
    refitted"; None for a stage that refits nothing."""
    found = [x for x in stage.repairs if x.before is not None and x.after is not None]
    if not found:
        return None
    before, after = (_mean([getattr(x, name) for x in found]) for name in ("before", "after"))
    linears = units.counted(len(found), "linear")
    return (
        f"{stage.name}: of what {linears} should give, {units.percent(before)} is missed on"
        f" held-out rows without refitting, {units.percent(after)} with it"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
