"""Units of a pass that trains, and its files in OUT.partial."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compress.edits.distill import DistillConfig
from compress.passes.units import EMBED, OUTSIDE, block_unit
from compress.plan.passes import PassPlan
from compress.report.schema import Course

if TYPE_CHECKING:
    from compress.distill.loop import Learned

ROWS = "rows"  # the unit whose data is the summary of the rows to train on
TEACHER = "teacher"  # the unit that kept what the teacher says
WEIGHTS = "weights"  # the unit that wrote the tensors
LEARNED = "learned"  # key of a unit's record: what became of a training
ROWS_FILE = "training.rows.safetensors"
STATE = "training.state"  # of a training that is not over
STATES = "training.states"  # hidden states of the teacher on its way through its blocks
KEPT = ("teacher.ids", "teacher.log_probs", "teacher.rest")  # what the teacher says
OF_MODEL = (STATE, f"{STATE}.new", STATES, *KEPT)  # all that scope "model" makes for the time being


def training_units(planned: PassPlan) -> list[str]:
    """All units of the pass in order."""
    stage = planned.stage
    config = None if stage is None else stage.config
    assert isinstance(config, DistillConfig), "the pass does not train"
    if config.scope == ("model",):
        kept = [TEACHER] if config.by_cache else []
        return [ROWS, *kept, WEIGHTS]
    blocks = [block_unit(block.index) for block in planned.result.spec.blocks]
    return [ROWS, OUTSIDE, EMBED, *blocks]


def told(name: str, learned: "Learned") -> dict[str, Any]:
    """What the journal has of a training, in the fields of a Course."""
    points = learned.curve
    return {
        "name": name,
        "start": learned.start,
        "end": learned.end,
        "ended": learned.ended,
        "steps": [point.step for point in points],
        "tokens": [point.tokens for point in points],
        "losses": [point.train for point in points],
        "held": [point.held for point in points],
        "rates": [point.rate for point in points],
    }


def courses_of(units: Mapping[str, Any]) -> tuple[Course, ...]:
    """The trainings that such a pass has recorded."""
    found = [data[LEARNED] for data in units.values() if LEARNED in data]
    lists = ("steps", "tokens", "losses", "held", "rates")
    return tuple(Course(**(x | {name: tuple(x[name]) for name in lists})) for x in found)
