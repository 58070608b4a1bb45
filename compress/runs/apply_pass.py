"""One pass of an edit, or of a training, by the kind of work that it is."""

from compress.formats import Weights, open_weights
from compress.passes.context import PassContext
from compress.passes.edit import apply_edit, edit_units
from compress.passes.structure.files import learned_units
from compress.passes.training.units import training_units
from compress.plan.passes import PassPlan
from compress.runs.session import Session


def units_of(planned: PassPlan) -> list[str]:
    """All units of the pass, in order."""
    if planned.trains:
        return training_units(planned)
    if planned.needs_data:
        return learned_units(planned)
    return [unit for unit, _, _ in edit_units(planned.source)]


def apply_pass(
    session: Session, work: PassContext, planned: PassPlan, dense: Weights | None = None
) -> None:
    """Carry out what is left of the pass. dense: what the stages that round have read, for a pass
    that moves codes."""
    if not planned.needs_data:
        apply_edit(work, planned)
        return
    # Late: an edit by tensor never loads transformers.
    if planned.trains:
        from compress.passes.training.setting import TrainingPass
        from compress.passes.training.train import carry_out_training

        other, source = session.teachers.get(planned.teacher), session.weights
        teacher = source if other is None else open_weights(other.checkpoint, other.outline.spec)
        folder = session.output.partial
        carry_out_training(TrainingPass(work, planned, source, teacher, folder, dense))
        return
    from compress.passes.structure.change import LearnedPass
    from compress.passes.structure.learned import apply_learned

    apply_learned(LearnedPass(work, planned, session.weights, session.output.partial))
