"""Where a resumed run goes on, in one line."""

from compress.passes import journal as journals
from compress.passes.journal import Journal
from compress.plan.passes import PassPlan
from compress.plan.plan import Plan

# Units that are not a part of the model.
OTHERS = (journals.START, journals.CALIBRATION, journals.MEASURED, journals.CHOSEN, journals.LOADS)


def where_it_goes_on(plan: Plan, journal: Journal) -> str:
    """Which passes are done, and what the next one has."""
    done, begun = [], None
    for planned in plan.passes:
        part = journal.passes.get(planned.name)
        if part is None:
            break
        if journals.WHOLE not in part.units:
            begun = planned
            break
        done.append(planned.label)
    finished = f"{', '.join(done)} done before" if done else ""
    if begun is None:
        return finished or "nothing was finished before"
    return "; ".join(x for x in (finished, _within(begun, journal)) if x)


def _within(planned: PassPlan, journal: Journal) -> str:
    units = [x for x in journal.passes[planned.name].units if x not in OTHERS]
    if not units:
        return f"{planned.label} begins"
    return f"{planned.label} goes on behind {units[-1]}"
