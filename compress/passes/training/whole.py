"""The pass that trains the whole student: scope "model"."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from compress.blocks.landed import land
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.distill.loop import Learned, train
from compress.distill.model import ModelScope
from compress.distill.rows import TokenRows
from compress.distill.state import State, read_state, write_state
from compress.distill.student import WholeModel, open_whole
from compress.distill.trained import Trained, adapters, only, tuned, whole
from compress.passes.context import record_unit
from compress.passes.copying import copy
from compress.passes.edit import WRITTEN
from compress.passes.structure.files import remove_files
from compress.passes.structure.tokens import skeleton_of
from compress.passes.training.codes import codes_of, stored_dtype, stored_parts
from compress.passes.training.rows import rows_of
from compress.passes.training.setting import (
    TrainingPass,
    objective_of,
    training_of,
)
from compress.passes.training.teacher import teacher_of
from compress.passes.training.units import LEARNED, OF_MODEL, STATE, WEIGHTS, told

SAVED_EVERY = 30.0  # seconds of a training that a kill may cost


def train_model(each: TrainingPass) -> None:
    """Carry out what the journal does not have as finished."""
    work = each.work
    learn, held = rows_of(each)
    every = joined(learn, held)
    teacher = teacher_of(each, every)
    skeleton = skeleton_of(work, work.weights)
    student = open_whole(work.weights, skeleton, plain=not each.config.tunes)
    if each.config.recompute:
        student.checkpoint_blocks()
    trained = _trained(each, student)
    training = training_of(each.config, len(learn.ids), learn.ids.shape[1], each.seed)
    objective = objective_of(each.config)
    scope = ModelScope(student, trained, teacher, learn, held, objective, training.micro)
    scope = replace(scope, matched=_matched(each) if objective.blocks else ())
    path = each.working / STATE
    learned = train(
        scope, training, stored_dtype(work), read_state(path), _Saver(path), work.progress
    )
    _write(each, learned, student.landed)
    remove_files(each.working, OF_MODEL)


def _matched(each: TrainingPass) -> tuple[tuple[int, int], ...]:
    """Each of the student's blocks with the last of the teacher's that it stands for."""
    origin = (*each.planned.origin, len(each.source.spec.blocks))
    return tuple((turn, after - 1) for turn, after in enumerate(origin[1:]))


def joined(learn: TokenRows, held: TokenRows) -> TokenRows:
    """All rows, in the order of their index."""
    index = torch.cat([learn.index, held.index])
    order = index.argsort()
    masks = None
    if learn.mask is not None and held.mask is not None:
        masks = torch.cat([learn.mask, held.mask])[order]
    return TokenRows(torch.cat([learn.ids, held.ids])[order], masks, index[order])


def _trained(each: TrainingPass, student: WholeModel) -> Trained:
    config = each.config
    if config.tunes:
        codes = codes_of(each.work.weights, student.linears)
        return tuned(student.model, student.names, student.linears, codes, config.train)
    if config.train == ("lora",):
        return adapters(student.model, student.linears, config.rank, each.seed)
    if config.train == ("changed",):
        changed = each.work.plan.model.student_of(each.planned).changed
        found = only(student.model, student.names, changed)
    else:
        found = whole(student.model, student.names)
    return replace(found, matrices=frozenset(found.parameters.keys() & student.linears.keys()))


class _Saver:
    """Keeps a training's state now and then; what is lost by a kill is done again to the bit."""

    def __init__(self, path: Path) -> None:
        self.path, self.saved = path, time.perf_counter()

    def __call__(self, state: State) -> None:
        if state.standing.ended or time.perf_counter() - self.saved > SAVED_EVERY:
            write_state(self.path, state)
            self.saved = time.perf_counter()


def _write(each: TrainingPass, learned: Learned, landed: Mapping[str, int]) -> None:
    """Write every tensor, and record what became of the training. landed: of the student."""
    work = each.work
    names = list(work.checkpoint.tensors)
    parts = land(stored_parts(work.weights, learned.weights), landed)
    for name in names:
        value: Tensor | None = parts.get(name)
        if value is None:
            copy(work.checkpoint, work.writer, [name])
        else:
            stored = TORCH_DTYPES[work.checkpoint.tensors[name].dtype]
            work.writer.write(name, value.to(stored))
    work.writer.flush(names)
    work.writer.written |= set(names)
    record_unit(work, WEIGHTS, {WRITTEN: names, LEARNED: told("model", learned)})
