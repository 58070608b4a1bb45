"""A whole student with its teacher, all of it in memory: scope "model"."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.distill.head import Lesson, head_loss
from compress.distill.losses import Objective
from compress.distill.rows import TokenRows
from compress.distill.student import WholeModel
from compress.distill.teacher import Teacher
from compress.distill.trained import Trained


@dataclass(frozen=True, slots=True, eq=False)
class ModelScope:
    """Who learns what of whom; a scope for `loop.train`.

    learn: rows to train on. held: to measure on, and for nothing else. micro: rows of them at once.
    """

    student: WholeModel
    trained: Trained
    teacher: Teacher
    learn: TokenRows
    held: TokenRows
    objective: Objective
    micro: int = 8

    @property
    def stage(self) -> str:
        return "distill"

    @property
    def hidden(self) -> int:
        return self.student.hidden_size

    @property
    def rows(self) -> int:
        return len(self.learn.ids)

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
        hidden = self.student.hidden(rows.ids, rows.mask).flatten(0, 1)
        lesson = Lesson(
            self.teacher.targets(rows),
            self.objective,
            rows.labels() if self.objective.ce else None,
            None if rows.mask is None else rows.mask.flatten(),
        )
        return head_loss(hidden, self.student.head, lesson)
