"""Where a resumed run goes on, in one line."""

from compress.passes import journal as journals
from compress.passes.journal import PROVED, Journal
from compress.passes.quantize import stream
from compress.plan.passes import PassPlan
from compress.plan.plan import Plan
from compress.runs.apply_pass import units_of

# How units that are a part of the model begin.
PARTS = ("block ", "outside", "embed", "head")


def where_it_goes_on(plan: Plan, journal: Journal) -> str:
    """Which passes are done, and what the next one has."""
    done, begun = [], None
    for planned in plan.passes:
        part = journal.passes.get(planned.name)
        if part is None:
            break
        if journals.WHOLE not in part.units and not _is_last_and_done(plan, planned, journal):
            begun = planned
            break
        done.append(planned.label)
    finished = f"{', '.join(done)} done before" if done else ""
    if begun is None:
        return finished or "nothing was finished before"
    return "; ".join(x for x in (finished, _within(begun, journal)) if x)


def _within(planned: PassPlan, journal: Journal) -> str:
    units = [x for x in journal.passes[planned.name].units if x.startswith(PARTS)]
    if not units:
        return f"{planned.label} goes on"
    return f"{planned.label} goes on behind {units[-1]}"


def _is_last_and_done(plan: Plan, planned: PassPlan, journal: Journal) -> bool:
    """The last pass is no checkpoint that another one reads: it is done with its last unit."""
    if planned is not plan.passes[-1]:
        return False
    if plan.file is not None:
        return PROVED in journal.passes[planned.name].units
    rounds = planned.stage is None
    units = [unit for unit, _, _ in stream.units(plan)] if rounds else units_of(planned)
    return set(units) <= journal.passes[planned.name].units.keys()
