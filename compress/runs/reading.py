"""Which models the passes of a run read."""

from collections.abc import Sequence

from compress.plan.passes import ROUNDING, PassPlan


def models_read(passes: Sequence[PassPlan], index: int) -> set[int]:
    """Which passes wrote the models that pass `index` reads; the run's source is none of them."""
    found = {index - 1}
    if passes[index].moves_codes:
        names = [each.name for each in passes]
        found.add(names.index(ROUNDING) - 1)
    return found - {-1}


def models_needed(passes: Sequence[PassPlan], index: int) -> set[int]:
    """Which passes wrote the models that pass `index` or one behind it reads."""
    return set[int]().union(*(models_read(passes, i) for i in range(index, len(passes))))
