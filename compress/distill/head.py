"""The output head and the loss together, some rows at a time.

Logits of all tokens are the largest tensor of a training step: 16 x 256 tokens of 4,096 classes are
67 MB in fp32, and the teacher's as many. Here they exist for one run of rows only. The gradients by
hidden states and head are taken in the forward, while the logits are there, so that backward has
nothing to compute again; it multiplies by what flows in.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.distill.losses import Classes, Objective, row_losses, wide

# Of logits held at a time: 2 M numbers are 512 rows of 4,096 classes. On tale-6m products with the
# head ran at 81 GFLOP/s with 512 rows and at 55 with 1,024 and more (EPYC, AVX2, one thread).
CHUNK_ELEMENTS = 2 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What makes logits of the final norm's output.

    run: [n, hidden] -> [n, vocab]. parameters: those that it computes with, all leaves.
    """

    run: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    vocab: int

    @property
    def rows_at_once(self) -> int:
        return max(1, CHUNK_ELEMENTS // self.vocab)


class Targets(Protocol):
    """What a teacher says of the tokens of a step, [batch, length] laid end to end."""

    def of(self, cut: slice) -> Classes:
        """Of these tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What the tokens of a step are held to.

    targets: of the teacher. labels: next tokens, int64 [n]; None where the objective does not ask.
    mask: bool [n], False for padding; None where there is none.
    """

    targets: Targets
    objective: Objective
    labels: Tensor | None = None
    mask: Tensor | None = None

    def losses(self, logits: Tensor, cut: slice) -> tuple[Tensor, Tensor]:
        """Of tokens `cut`, with logits [c, vocab]: their sum, and its gradient by the logits."""
        labels = None if self.labels is None else self.labels[cut]
        value, gradient = row_losses(logits, self.targets.of(cut), labels, self.objective)
        if self.mask is not None:
            kept = self.mask[cut]
            value, gradient = value * kept, gradient.mul_(kept.unsqueeze(-1))
        return value.sum(), gradient.to(logits.dtype)


def head_loss(hidden: Tensor, head: Head, lesson: Lesson, rows: int | None = None) -> Tensor:
    """Sum of the objective over all tokens that count: [] in fp32 at least, differentiable once.

    hidden: [n, hidden]. rows: tokens at a time, `head.rows_at_once` by default. Gradients go to
    `hidden` and to those of the head's parameters that require them.
    """
    step = head.rows_at_once if rows is None else rows
    apply: Any = _HeadLoss.apply  # torch gives it no types
    total: Tensor = apply(hidden, head, lesson, step, *head.parameters)
    return total


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, lesson: Lesson, step: int, *parameters: Tensor
    ) -> Tensor:
        asked = [needs for i, needs in enumerate(ctx.needs_input_grad) if i == 0 or i > 3]
        total = wide(hidden.new_zeros(()))
        sums = [torch.zeros_like(x) for x in (hidden, *parameters)] if any(asked) else []
        for cut in _cuts(len(hidden), step):
            # A leaf of its own: autograd looks at this run of rows alone.
            part = hidden[cut].detach().requires_grad_(asked[0])
            leaves = [part, *parameters]
            with torch.set_grad_enabled(any(asked)):
                logits = head.run(part)
            value, gradient = lesson.losses(logits.detach(), cut)
            total += value
            wanted = [i for i, needs in enumerate(asked) if needs]
            for i, found in zip(wanted, _gradients(logits, leaves, wanted, gradient), strict=True):
                target = sums[0][cut] if i == 0 else sums[i]
                target += found
        ctx.asked = asked
        ctx.save_for_backward(*sums)
        return total

    @staticmethod
    def backward(ctx: Any, *flowing: Tensor) -> tuple[Tensor | None, ...]:
        found = [
            held * flowing[0] if needs else None
            for held, needs in zip(ctx.saved_tensors, ctx.asked, strict=True)
        ]
        return found[0], None, None, None, *found[1:]


def _gradients(
    logits: Tensor, leaves: list[Tensor], wanted: list[int], gradient: Tensor
) -> tuple[Tensor, ...]:
    if not wanted:
        return ()
    return torch.autograd.grad(logits, [leaves[i] for i in wanted], gradient)


def _cuts(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
