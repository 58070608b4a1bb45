"""What the teacher says of all rows: kept from one walk over its blocks, or asked each step."""

from functools import partial

import torch

from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, token_batches, walk
from compress.distill.head import Head
from compress.distill.memory import TEACHER_BATCH, WALKED_STATES
from compress.distill.rows import TokenRows
from compress.distill.student import open_whole
from compress.distill.teacher import CachedTeacher, ResidentTeacher, Teacher, open_cache
from compress.events import by_tenths
from compress.passes.context import record_unit
from compress.passes.structure.tokens import skeleton_of
from compress.passes.training.setting import TrainingPass
from compress.passes.training.units import STATES, TEACHER
from compress.plan.row_counts import rows_at_once


def teacher_of(each: TrainingPass, rows: TokenRows) -> Teacher:
    """rows: all, in the order of their index."""
    config, work = each.config, each.work
    skeleton = skeleton_of(work, each.teacher)
    if not config.by_cache:
        return ResidentTeacher(open_whole(each.teacher, skeleton))
    count, length = rows.ids.shape
    # Padded vocabularies are cut to what both have, which is all that the tokenizer knows.
    vocab = min(x.spec.embedding_shape[0] for x in (each.teacher, work.weights))
    cache = open_cache(each.working, (count, length), config.cache, vocab)
    if TEACHER not in work.journal.units:
        _fill(each, cache, rows)
        cache.flush()
        record_unit(work, TEACHER, {})
    return cache


def _fill(each: TrainingPass, cache: CachedTeacher, rows: TokenRows) -> None:
    """Walk over the teacher's blocks with all rows, in one file that is overwritten in place."""
    work, spec = each.work, each.teacher.spec
    shape = (*rows.ids.shape, spec.hidden)
    batches = token_batches(rows.ids, rows.mask, rows_at_once(shape, work.dtype, TEACHER_BATCH))
    shapes = [(*batch.ids.shape, spec.hidden) for batch in batches]
    path, skeleton = each.working / STATES, skeleton_of(work, each.teacher)
    counter = by_tenths(work.progress, "distill", "what the teacher says")
    with HiddenStates(path, shapes, work.dtype, budget=WALKED_STATES) as states:
        chain = Chain(skeleton, each.teacher, batches, (states,))
        chain.embed()
        for block in walk(chain):
            block.run_on()
            counter(block.spec.index + 1, len(spec.blocks) + 1)
        head = Head(partial(skeleton.logits, each.teacher), (torch.empty(0),), spec.vocab)
        start = 0
        for hidden in chain.final():
            cache.fill(start, hidden, head)
            start += len(hidden)
    skeleton.release()
    counter(len(spec.blocks) + 1, len(spec.blocks) + 1)
