"""What stages that change the structure did: what they took from each linear and how well the rest
was refitted, and what became of trainings. Each a line for the terminal, and a table for the page.
"""

from collections.abc import Sequence

from compress.report import units
from compress.report.markup import Html
from compress.report.parts import Cell, Column, number, section, table
from compress.report.records.sizes import SizeCandidate
from compress.report.schema import Course, LinearRepair, Report, StageRecord

NOTE = (
    "Missed is the share of the energy of what a linear should give beside what it keeps of the"
    " source that it does not give, on calibration rows that no fit saw: the others were fitted."
)
TRAINED_NOTE = (
    "Of scope model the loss is the divergence from the teacher in nats a token; of a block the"
    " squared error of its output, as a share of what the block is to add. Both are of rows that"
    " were not trained on. The best state is kept, which may be the start."
)
SEARCHED_NOTE = (
    "Loss is the divergence from the source in nats a token, on calibration rows that no fit saw,"
    " of the model cut and refitted on few rows. Predicted is the sum of what each axis loses by"
    " itself. The front has the candidates of which none other takes and loses less."
)
AXES = {
    "ffn": "FFN",
    "heads": "Heads",
    "kv_heads": "Key/value heads",
    "experts": "Experts",
    "layers": "Blocks",
    "rank": "Latent",
    "rope_dim": "Rotated",
}
TOLD = ("ffn", "heads", "experts", "rank", "rope_dim")  # in the line about what was chosen
TAKEN = {"params": "Parameters", "bytes": "Bytes", "kv_bytes_per_token": "Cache bytes a token"}


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


def courses(report: Report) -> Html | None:
    """Every measurement of every training; None without."""
    rows = [
        _point(stage, course, point)
        for stage in report.stages
        for course in stage.courses
        for point in range(len(course.steps))
    ]
    if not rows:
        return None
    columns = [
        *(Column("Stage"), Column("Of"), Column("Step", True), Column("Tokens", True)),
        *(Column("Loss", True), Column("Held-out loss", True), Column("Rate", True)),
        Column("End"),
    ]
    return section("training", "Training", table("Training", columns, rows), note=TRAINED_NOTE)


def _point(stage: StageRecord, course: Course, point: int) -> list[Cell]:
    def loss(value: float | None) -> Cell:
        return number(value, None if value is None else units.significant(value))

    last = point == len(course.steps) - 1
    return [
        Cell(stage.name),
        Cell(course.name),
        number(course.steps[point], str(course.steps[point])),
        number(course.tokens[point], units.count(course.tokens[point])),
        loss(course.losses[point]),
        loss(course.held[point]),
        loss(course.rates[point]),
        Cell(course.ended if last else ""),
    ]


def trained(stage: StageRecord) -> str | None:
    """One line about a stage: its losses on held-out rows, and how it ended; None for a stage that
    trains nothing."""
    found = stage.courses
    if not found:
        return None
    start, end = (sum(getattr(x, name) for x in found) / len(found) for name in ("start", "end"))
    of = f" (mean of {units.counted(len(found), 'block')})" if len(found) > 1 else ""
    ended = f"; {found[0].ended}" if len(found) == 1 else ""
    apart = sum(course.ended.startswith("diverged") for course in found)
    if apart and len(found) > 1:
        ended = f"; {apart} of them diverged"
    return (
        f"{stage.name}: held-out loss {units.significant(start)} became"
        f" {units.significant(end)}{of}{ended}"
    )


def searched(report: Report) -> Html | None:
    """A table of all sizes that were measured, the smallest first; None without a search."""
    found = [(stage, x) for stage in report.stages for x in stage.candidates]
    if not found:
        return None
    axes = [name for name in AXES if any(name in x.sizes for _, x in found)]
    rows = [_tried(stage, x, axes) for stage, x in sorted(found, key=lambda pair: pair[1].takes)]
    columns = [
        *(Column("Stage"), *(Column(AXES[name], True) for name in axes)),
        Column(TAKEN[found[0][1].measure], True),
        *(Column("Loss", True), Column("Predicted", True), Column("Place")),
    ]
    return section("searched", "Sizes", table("Sizes", columns, rows), note=SEARCHED_NOTE)


def _tried(stage: StageRecord, tried: SizeCandidate, axes: Sequence[str]) -> list[Cell]:
    place = tried.place or ("front" if tried in front(stage.candidates) else "")
    predicted = tried.predicted
    return [
        Cell(stage.name),
        *(_count(tried.sizes.get(name)) for name in axes),
        number(tried.takes, units.whole(tried.takes)),
        number(tried.loss, units.significant(tried.loss)),
        number(predicted, None if predicted is None else units.significant(predicted)),
        Cell(place),
    ]


def _count(value: int | None) -> Cell:
    return number(value, None if value is None else units.whole(value))


def front(tried: Sequence[SizeCandidate]) -> list[SizeCandidate]:
    """Those of which none other takes no more and loses less, or takes less and loses no more."""

    def better(x: SizeCandidate, y: SizeCandidate) -> bool:
        return x.takes <= y.takes and x.loss <= y.loss and (x.takes, x.loss) != (y.takes, y.loss)

    return [x for x in tried if not any(better(y, x) for y in tried)]


def other_splits(stage: StageRecord) -> str | None:
    """One line about a budget that was split: "112 + 16 lose 0.081, 80 + 48 0.084", the splits that
    were not chosen; None for a stage that splits none. Few rows can make them a tie."""
    rest = [x for x in stage.candidates if not x.place]
    if not rest or not all({"rank", "rope_dim"} <= set(x.sizes) for x in rest):
        return None
    said = [
        f"{x.sizes['rank']} + {x.sizes['rope_dim']} {units.significant(x.loss)}"
        for x in sorted(rest, key=lambda x: x.loss)
    ]
    return f"rank + rope_dim and what they lose: {', '.join(said)}"


def chosen_sizes(stage: StageRecord) -> str | None:
    """One line about a stage: "prune: ffn 320, heads 5, 6 blocks lose 0.42 nats a token ..., the
    least of 6 that were measured together"; None for a stage that searches nothing."""
    best = next((x for x in stage.candidates if x.place), None)
    if best is None:
        return None
    # One axis alone has no prediction; where nothing is predicted, all were measured as they are.
    together = sum(x.predicted is not None for x in stage.candidates) or len(stage.candidates)
    said = [f"{name} {best.sizes[name]}" for name in TOLD if name in best.sizes]
    if "layers" in best.sizes:
        said.append(units.counted(best.sizes["layers"], "block"))
    return (
        f"{stage.name}: {', '.join(said)} lose {units.significant(best.loss)} nats a token on"
        f" held-out rows, the least of {units.counted(together, 'combination')} that were measured"
    )
