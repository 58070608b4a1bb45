"""A whole student with its teacher, all of it in memory: scope "model"."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.distill.head import Lesson, Targets, head_loss
from compress.distill.losses import Objective, block_output_losses
from compress.distill.rows import TokenRows
from compress.distill.schedule import rate_for
from compress.distill.student import WholeModel
from compress.distill.teacher import Computed, ResidentTeacher, Teacher
from compress.distill.trained import Trained


@dataclass(frozen=True, slots=True, eq=False)
class ModelScope:
    """Who learns what of whom; a scope for `loop.train`.

    learn: rows to train on. held: to measure on, and for nothing else. micro: rows of them at once.
    matched: (block of the student, block of the teacher) whose outputs are compared where the
    objective asks; that takes a resident teacher of the student's width.
    """

    student: WholeModel
    trained: Trained
    teacher: Teacher
    learn: TokenRows
    held: TokenRows
    objective: Objective
    micro: int = 8
    matched: tuple[tuple[int, int], ...] = ()

    @property
    def stage(self) -> str:
        return "distill"

    @property
    def rows(self) -> int:
        return len(self.learn.ids)

    def peak(self, loss: float) -> float:
        return rate_for(loss, self.student.hidden_size)

    def tokens(self, places: Tensor) -> int:
        return self.learn.take(places).tokens

    def loss(self, places: Tensor) -> Tensor:
        return self._loss(self.learn.take(places, self.student.device))

    def held_loss(self) -> float:
        parts = self.held.parts(self.micro, self.student.device)
        with torch.no_grad():
            total = sum(self._loss(part).item() for part in parts)
        return total / max(1, self.held.tokens)

    def _loss(self, rows: TokenRows) -> Tensor:
        """Sum over all tokens."""
        hidden, outputs = self._forward(self.student, rows, [ours for ours, _ in self.matched])
        mask = None if rows.mask is None else rows.mask.flatten()
        labels = rows.labels() if self.objective.ce else None
        targets, expected = self._taught(rows)
        lesson = Lesson(targets, self.objective, labels, mask)
        total = head_loss(hidden, self.student.head, lesson)
        if not outputs:
            return total
        apart = block_output_losses(outputs, expected)
        apart = apart if mask is None else apart.masked_fill(~mask, 0.0)
        return total + self.objective.blocks * apart.sum()

    def _taught(self, rows: TokenRows) -> tuple[Targets, list[Tensor]]:
        """What the teacher says, and the outputs of its blocks that are matched."""
        if not self._matches:
            return self.teacher.targets(rows), []
        assert isinstance(self.teacher, ResidentTeacher), "a cache holds no outputs of blocks"
        with torch.no_grad():
            whole = self.teacher.model
            hidden, found = self._forward(whole, rows, [theirs for _, theirs in self.matched])
        return Computed(hidden, whole.head), found

    @property
    def _matches(self) -> bool:
        return bool(self.objective.blocks and self.matched)

    def _forward(
        self, model: WholeModel, rows: TokenRows, blocks: list[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Final states [n, hidden], and the outputs of blocks, where any are matched."""
        if not self._matches:
            return model.hidden(rows.ids, rows.mask).flatten(0, 1), []
        hidden, outputs = model.watched(rows.ids, rows.mask, blocks)
        return hidden.flatten(0, 1), [each.flatten(0, 1) for each in outputs]
