"""Who goes first in a step. A policy fills a draft from the queues; the table is at the end."""

from collections.abc import Callable, Mapping

from compress.runtime.engine.scheduler import WATERMARK, Scheduler
from compress.runtime.engine.step import Draft, Step
from compress.runtime.sequences.sequence import Sequence, Status


def schedule(scheduler: Scheduler) -> Step:
    """The next step. It has items whenever a sequence runs or waits."""
    draft = Draft(scheduler.limits.tokens_per_step)
    POLICIES[scheduler.limits.policy](scheduler, draft)
    return draft.finish()


def _mixed(scheduler: Scheduler, draft: Draft) -> None:
    """Outputs first, so that none of them waits for somebody's long prompt; then prompts."""
    outputs = [sequence for sequence in scheduler.running if sequence.decoding]
    prompts: list[Sequence] = []
    if len(outputs) < len(scheduler.running):
        prompts = [sequence for sequence in scheduler.running if not sequence.decoding]
    _grow(scheduler, draft, [*outputs, *prompts])
    while _open(scheduler, draft) and draft.budget > 0:
        sequence = scheduler.waiting[0]
        if not scheduler.admit(sequence, whole=False, watermark=WATERMARK):
            return
        scheduler.grow(draft, sequence)


def _static(scheduler: Scheduler, draft: Draft) -> None:
    """A batch is let in when nobody runs, and nobody joins it."""
    if not scheduler.running:
        while _open(scheduler, draft):
            if not scheduler.admit(scheduler.waiting[0], whole=True, watermark=0):
                break
    _grow(scheduler, draft, list(scheduler.running))


def _separate(scheduler: Scheduler, draft: Draft) -> None:
    """Prompts are read in steps of their own, for which the outputs stand still.

    As text-generation-inference does it: beside B running sequences at least floor(B x
    waiting_served_ratio) of the queue must come in together, unless max_waiting_steps steps of
    output have passed since the last time; after each prompt step comes a step of output, but for
    the one that ended idleness. Everyone let in has room for all it may need. A prompt longer than
    a step comes alone and takes several in a row.
    """
    prompts = [s for s in scheduler.running if not s.decoding]
    if not prompts:
        prompts = _onboard(scheduler)
    if prompts:
        draft.budget = scheduler.limits.prompt_step(scheduler.tables.block_size)
        _grow(scheduler, draft, prompts)
    if not draft.items:
        _grow(scheduler, draft, [s for s in scheduler.running if s.decoding])
        scheduler.waiting_steps += 1
        scheduler.onboarded = False


def _onboard(scheduler: Scheduler) -> list[Sequence]:
    """Those of the queue that come in now."""
    running = len(scheduler.running)
    if not scheduler.waiting or (running and scheduler.onboarded):
        return []
    limits = scheduler.limits
    waited = scheduler.waiting_steps >= limits.max_waiting_steps
    least = 0 if not running or waited else int(running * limits.waiting_served_ratio)
    if sum(map(_places, scheduler.waiting)) < least:
        return []
    taken = _take_batch(scheduler)
    if sum(map(_places, taken)) < least:
        for sequence in reversed(taken):
            scheduler.withdraw(sequence)
        return []
    if taken:
        scheduler.waiting_steps, scheduler.onboarded = 1, running > 0
    return taken


def _take_batch(scheduler: Scheduler) -> list[Sequence]:
    """Lets in what fits into one prompt step, the cache, and the number that may run."""
    budget = scheduler.limits.prompt_step(scheduler.tables.block_size)
    places = scheduler.limits.running - len(scheduler.running)
    taken: list[Sequence] = []
    while scheduler.waiting:
        sequence = scheduler.waiting[0]
        places -= _places(sequence)
        if places < 0 and scheduler.running:
            break
        if not scheduler.admit(sequence, whole=True, watermark=0):
            break
        budget -= sequence.pending
        if budget < 0 and taken:
            scheduler.withdraw(sequence)
            break
        taken.append(sequence)
    return taken


def _places(sequence: Sequence) -> int:
    """Sequences that run once this one's prompt is read."""
    return 1 + len(sequence.followers)


def _open(scheduler: Scheduler, draft: Draft) -> bool:
    room = len(scheduler.running) < scheduler.limits.running
    return bool(scheduler.waiting) and room and not draft.crowded


def _grow(scheduler: Scheduler, draft: Draft, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        # One of the list may have been preempted for another.
        if sequence.status is Status.RUNNING:
            scheduler.grow(draft, sequence)


Policy = Callable[[Scheduler, Draft], None]
POLICIES: Mapping[str, Policy] = {"mixed": _mixed, "separate": _separate, "static": _static}
