"""The loop of a training, whoever is trained: steps, measurements, the best state, the end."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, isfinite
from typing import Protocol

import torch
from torch import Tensor

from compress.distill import optimizer as optimizers
from compress.distill.masters import Masters
from compress.distill.optimizer import OptimizerName
from compress.distill.rows import Order
from compress.distill.schedule import ScheduleName, by_rows, rates
from compress.distill.state import CurvePoint, Standing, State
from compress.distill.trained import Trained
from compress.events import Event, Progress, note, silent
from compress.quant.tensor import QuantizedTensor

QUIET = 10.0  # seconds without a word, at most about


@dataclass(frozen=True, slots=True)
class Training:
    """How a student is trained.

    steps, batch: rows of a step are `batch`, `micro` of them at a time in memory. rate: the peak;
    None for one that follows the damage. clip: norm of the gradients at most. every: steps between
    two measurements on the held-out rows. patience: measurements without a better one after which
    it stops; 0 for never.
    """

    steps: int
    batch: int = 8
    micro: int = 8
    optimizer: OptimizerName = "adamw"
    schedule: ScheduleName = "cosine"
    rate: float | None = None
    clip: float = 1.0
    every: int = 50
    patience: int = 0
    seed: int = 0


class Scope(Protocol):
    """A student with what it is held to. A place is a row, of those that are trained on."""

    @property
    def stage(self) -> str:
        """What events call it."""

    @property
    def trained(self) -> Trained: ...

    @property
    def rows(self) -> int:
        """How many there are to train on."""

    def peak(self, loss: float) -> float:
        """The rate for a student whose loss is that before the first step."""

    def tokens(self, places: Tensor) -> int:
        """Those of the rows that count."""

    def loss(self, places: Tensor) -> Tensor:
        """Sum over the tokens of these rows, differentiable."""

    def held_loss(self) -> float:
        """Mean over the tokens of held-out rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """What became of it.

    weights: by tensor of the checkpoint, in the dtype of the result, and of what is rounded as
    `Trained.settle` says; empty where nothing was better
    on the held-out rows than the start, which then stays. start, end: loss there, before and with
    these weights. ended: one line for the report. curve: from the start to the last step.
    """

    weights: dict[str, Tensor | QuantizedTensor]
    start: float
    end: float
    ended: str
    curve: tuple[CurvePoint, ...]


def train(
    scope: Scope,
    training: Training,
    dtype: torch.dtype,
    state: State | None = None,
    save: Callable[[State], None] = lambda state: None,
    progress: Progress = silent,
) -> Learned:
    """Train from the student as it is, or from where a killed training stood.

    dtype: of the result's tensors. state: what `save` was given; then the student is the one that
    the training began with. save: called after each step with the state, whose tensors the next
    step overwrites. All bits of the result follow from the arguments: with the same state, torch
    and number of threads they are the same.
    """
    run = _Run(scope, training, progress)
    if state is None:
        run.begin()
    else:
        run.restore(state)
    while not run.standing.ended:
        run.step()
        save(run.state())
    return run.finish(dtype)


@dataclass(slots=True, eq=False)
class _Run:
    scope: Scope
    training: Training
    progress: Progress
    standing: Standing = field(init=False)
    best: dict[str, Tensor] = field(init=False)
    masters: Masters = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    order: Order = field(init=False)
    shares: tuple[float, ...] = field(init=False)
    clock: float = field(default_factory=time.perf_counter)
    told: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        training = self.training
        assert training.steps > 0, "nothing to do"
        self.shares = rates(training.schedule, training.steps)
        self.order = Order(self.scope.rows, training.batch, training.seed)
        trained = self.scope.trained
        self.masters = Masters.of(trained.parameters)
        self.optimizer = optimizers.make(
            training.optimizer, self.masters.weights, 0.0, trained.matrices
        )

    def begin(self) -> None:
        """Measure the start, which the rate follows."""
        held = self.scope.held_loss()
        peak = self.training.rate
        if peak is None:
            peak = self.scope.peak(held) * by_rows(self.training.batch)
        ended = "" if isfinite(held) else f"the student's loss is {held} before the first step"
        if held == 0:  # a block that no edit has reached, at the first of those that stay
            ended = "nothing to learn: it gives what its teacher gives"
        self.standing = Standing(0, (CurvePoint(0, 0, None, held, 0.0),), 0, peak, ended=ended)
        self.best = self._copied()
        self._tell(self.standing.curve[0])

    def restore(self, state: State) -> None:
        """Go on from a state."""
        self.standing = state.standing
        self.best = {name: value.clone() for name, value in state.best.items()}
        self._put(state.weights)
        optimizers.load_state_tensors(self.optimizer, state.optimizer)

    def state(self) -> State:
        """As it stands, without copies."""
        weights = {name: weight.detach() for name, weight in self.masters.weights.items()}
        return State(self.standing, weights, self.best, optimizers.state_tensors(self.optimizer))

    def step(self) -> None:
        """One step of the optimizer, and a measurement where one is due."""
        standing, training = self.standing, self.training
        rate = standing.peak * self.shares[standing.step]
        optimizers.set_rate(self.optimizer, rate)
        places = self.order.at(standing.step)
        loss, norm = self._gradients(places)
        done, tokens = standing.step + 1, self.scope.tokens(places)
        if not (isfinite(loss) and isfinite(norm)):
            what = f"loss {loss}" if not isfinite(loss) else f"norm of the gradients {norm}"
            self.standing = replace(standing, step=done, ended=f"diverged at step {done} ({what})")
            return
        self.optimizer.step()
        self.masters.spread()
        self.standing = replace(
            standing,
            step=done,
            summed=standing.summed + loss,
            tokens_since=standing.tokens_since + tokens,
            tokens=standing.tokens + tokens,
        )
        if done % training.every == 0 or done == training.steps:
            self._measure(rate)
        elif time.perf_counter() - self.told > QUIET:
            self._tell_between(loss / max(1, tokens))

    def finish(self, dtype: torch.dtype) -> Learned:
        """The best state, as the result stores it; nothing where that is no better than the start.

        It is measured once more, since rounding may cost what a short training gained.
        """
        start, standing = self.standing.curve[0].held, self.standing
        weights: dict[str, Tensor | QuantizedTensor] = {}
        end, ended = start, standing.ended
        if standing.best:
            self._put(self.best)
            weights = self.scope.trained.settle(dtype, self.masters.weights)
            end = self.scope.held_loss()
        if not end < start:
            worse = f"; on held-out rows {end:.4g} is not below the start's {start:.4g}"
            return Learned({}, start, start, ended + worse * bool(standing.best), standing.curve)
        return Learned(weights, start, end, ended, standing.curve)

    def _gradients(self, places: Tensor) -> tuple[float, float]:
        """Sum of the losses of all tokens, and the norm of the gradients of their mean."""
        self.masters.clear()
        count, total = max(1, self.scope.tokens(places)), 0.0
        for part in torch.split(places, self.training.micro):
            loss = self.scope.loss(part)
            torch.autograd.backward(loss / count)
            self.masters.gather()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters(), self.training.clip)
        return total, norm.item()

    def _measure(self, rate: float) -> None:
        standing, held = self.standing, self.scope.held_loss()
        mean = standing.summed / max(1, standing.tokens_since)
        point = CurvePoint(standing.step, standing.tokens, mean, held, rate)
        best = {p.step: p.held for p in standing.curve}[standing.best]
        better = held < best
        if better:
            self.best = self._copied()
        curve = (*standing.curve, point)
        self.standing = replace(
            standing,
            curve=curve,
            best=standing.step if better else standing.best,
            summed=0.0,
            tokens_since=0,
        )
        self.standing = replace(self.standing, ended=self._why_ended(held))
        self._tell(point)

    def _why_ended(self, held: float) -> str:
        standing, training = self.standing, self.training
        if not isfinite(held):
            return f"diverged at step {standing.step} (loss {held} on held-out rows)"
        since = sum(point.step > standing.best for point in standing.curve)
        if training.patience and since >= training.patience:
            return f"stopped after {standing.step} steps: no better for {since} measurements"
        if standing.step < training.steps:
            return ""
        start = standing.curve[0].held
        if held > start:
            return f"diverged: {held:.4g} on held-out rows after all steps, {start:.4g} before"
        return f"finished after {standing.step} steps"

    def _tell(self, point: CurvePoint) -> None:
        now = time.perf_counter()
        shown = f"held-out {point.held:.4f}, rate {point.rate:.2g}"
        if point.train is not None:
            shown = f"loss {point.train:.4f}, {shown}"
        steps, every = self.training.steps, self.training.every
        index, total = ceil(point.step / every), ceil(steps / every)
        unit = f"step {point.step}" if point.step else "start"
        self.progress(Event(self.scope.stage, unit, index, total, now - self.clock, shown))
        self.clock = self.told = now

    def _tell_between(self, loss: float) -> None:
        """A sign of life between two measurements."""
        self.told = time.perf_counter()
        step, steps = self.standing.step, self.training.steps
        self.progress(note(self.scope.stage, f"step {step} of {steps}, loss {loss:.4f}"))

    def _parameters(self) -> list[Tensor]:
        return list(self.masters.weights.values())

    def _copied(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.masters.weights.items()}

    def _put(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self.masters.weights.items():
                weight.copy_(values[name])
        self.masters.spread()
