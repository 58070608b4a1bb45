"""The loop over a whole student: learns, resumes to the bit, never ends worse than it began."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.distill.loop import Learned, Training, train
from compress.distill.losses import Objective
from compress.distill.model import ModelScope
from compress.distill.optimizer import OptimizerName
from compress.distill.rows import TokenRows, split
from compress.distill.state import State, read_state, write_state
from compress.distill.student import WholeModel
from compress.distill.teacher import ResidentTeacher, open_cache
from compress.distill.trained import Trained, adapters, only, whole
from compress.errors import RecipeError
from compress.events import Event
from distill.conftest import Pair
from helpers import tiny_models

FP32 = torch.float32
SHORT = Training(steps=4, batch=4, micro=4, rate=3e-3, every=2)


class KilledError(Exception):
    pass


def everything(student: WholeModel) -> Trained:
    return whole(student.model, student.names)


def course(
    pair: Pair,
    rows: TokenRows,
    what: Callable[[WholeModel], Trained] = everything,
    noise: float = 0.05,
) -> ModelScope:
    student = pair.student(noise)
    learn, held = split(rows, 6, 0)
    teacher = ResidentTeacher(pair.teacher())
    return ModelScope(student, what(student), teacher, learn, held, Objective())


def parameter(student: WholeModel, tensor: str) -> Tensor:
    return student.model.get_parameter(student.names[tensor]).detach()


def same(one: Learned, other: Learned) -> bool:
    assert one.weights.keys() == other.weights.keys()
    equal = all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    return equal and standing(one) == standing(other)


def standing(learned: Learned) -> tuple[object, ...]:
    return learned.start, learned.end, learned.ended, learned.curve


def test_student_comes_nearer_to_its_teacher(pair: Pair, rows: TokenRows) -> None:
    work = course(pair, rows)
    events: list[Event] = []
    learned = train(work, replace(SHORT, steps=12, every=4), FP32, progress=events.append)
    assert learned.end < 0.8 * learned.start
    assert learned.ended == "finished after 12 steps"
    assert [point.step for point in learned.curve] == [0, 4, 8, 12]
    assert [(event.index, event.total) for event in events] == [(i, 3) for i in range(4)]
    assert learned.weights.keys() == work.student.names.keys()
    for name, value in learned.weights.items():
        assert torch.equal(value, parameter(work.student, name))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_killed_after_any_step_it_resumes_to_the_same_bits(
    pair: Pair, rows: TokenRows, tmp_path: Path, optimizer: OptimizerName
) -> None:
    """Steps 1 to 4, measured ones and others, across the end of an epoch (18 rows, 6 a step)."""
    training = replace(SHORT, batch=6, micro=4, optimizer=optimizer)
    wanted = train(course(pair, rows), training, torch.bfloat16)
    path = tmp_path / "state.safetensors"
    for killed in range(1, training.steps + 1):

        def save(state: State, last: int = killed) -> None:
            write_state(path, state)
            if state.standing.step == last:
                raise KilledError

        with pytest.raises(KilledError):
            train(course(pair, rows), training, torch.bfloat16, read_state(path), save)
    found = train(course(pair, rows), training, torch.bfloat16, read_state(path))
    assert same(found, wanted)
    assert found.weights


def test_adapters_and_tensors_that_an_edit_changed(
    pair: Pair, rows: TokenRows, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    changed = course(pair, rows, lambda x: only(x.model, x.names, [name]))
    before = {n: parameter(changed.student, n).clone() for n in changed.student.names}
    learned = train(changed, SHORT, FP32)
    assert learned.end < learned.start
    assert list(learned.weights) == [name]
    for other, value in before.items():
        assert torch.equal(parameter(changed.student, other), value) == (other != name)


def test_adapters_are_merged(pair: Pair, rows: TokenRows) -> None:
    """Into the linears of blocks and nothing else; what was measured last is the merged model."""
    spec = pair.spec()
    work = course(pair, rows, lambda x: adapters(x.model, x.linears, 4, 0))
    learned = train(work, replace(SHORT, steps=8, every=8), FP32)
    assert learned.end < learned.start
    assert learned.end == pytest.approx(learned.curve[-1].held, abs=1e-6)
    assert learned.weights.keys() == {x.tensor for b in spec.blocks for x in b.linears}
    merged = pair.student()
    with torch.no_grad():
        for tensor, value in learned.weights.items():
            parameter(merged, tensor).copy_(value)
        hidden = merged.hidden(rows.ids)
        torch.testing.assert_close(work.student.hidden(rows.ids), hidden)


def test_accumulated_gradients_are_those_of_the_whole_step(pair: Pair, rows: TokenRows) -> None:
    masked = replace(rows, mask=torch.arange(12) < torch.arange(24)[:, None] % 9 + 4)
    ends = [train(course(pair, masked), replace(SHORT, micro=size), FP32).end for size in (4, 1)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)


def test_checkpointed_blocks_give_the_same_bits(pair: Pair, rows: TokenRows) -> None:
    plain, saving = course(pair, rows), course(pair, rows)
    saving.student.checkpoint_blocks()
    assert same(train(saving, SHORT, FP32), train(plain, SHORT, FP32))


def test_divergence_keeps_the_best_state(pair: Pair, rows: TokenRows) -> None:
    """A rate far too high: first better or not, the end is never worse than the start."""
    learned = train(course(pair, rows), replace(SHORT, rate=3.0), FP32)
    assert learned.ended.startswith("diverged: ")
    assert learned.weights == {}
    assert learned.end == learned.start


def test_what_is_not_finite_ends_the_training(pair: Pair, rows: TokenRows) -> None:
    work = course(pair, rows)

    def poison(state: State) -> None:
        if state.standing.step == 2:
            with torch.no_grad():
                state.weights["model.norm.weight"][0] = float("nan")

    learned = train(work, SHORT, FP32, save=poison)
    assert learned.ended == "diverged at step 3 (loss nan)"
    assert learned.end < learned.start
    assert all(value.isfinite().all() for value in learned.weights.values())


def test_it_stops_early_and_says_so(pair: Pair, rows: TokenRows) -> None:
    training = replace(SHORT, steps=40, rate=0.5, every=1, patience=3, schedule="wsd")
    learned = train(course(pair, rows), training, FP32)
    best = min(learned.curve, key=lambda point: point.held).step
    stopped = f"stopped after {best + 3} steps: no better for 3 measurements"
    assert learned.ended.startswith(stopped)


def test_a_gain_that_rounding_takes_is_none(pair: Pair, rows: TokenRows) -> None:
    """It is measured as it is stored: 2 bits of mantissa cost more than was wrong."""
    work = course(pair, rows, noise=1e-3)
    learned = train(work, replace(SHORT, rate=1e-5), torch.float8_e5m2)
    assert learned.weights == {}
    assert "on held-out rows" in learned.ended
    assert learned.curve[-1].held < learned.start


def test_nothing_to_train_is_refused(pair: Pair) -> None:
    with pytest.raises(RecipeError, match=r"^nothing is left to train; "):
        only((student := pair.student()).model, student.names, ["vision.weight"])


@pytest.mark.parametrize(
    "objective", [Objective("reverse_kl"), Objective("jsd"), Objective("kl", 0.5)]
)
def test_other_objectives_fall_as_well(pair: Pair, rows: TokenRows, objective: Objective) -> None:
    learned = train(replace(course(pair, rows), objective=objective), SHORT, FP32)
    assert learned.end < learned.start


def test_block_outputs_come_nearer_where_they_are_asked_for(
    make_pair: Callable[..., Pair], rows: TokenRows
) -> None:
    """Of two blocks; the last one's output is what the final norm reads."""
    pair = make_pair("qwen3")
    both = ((0, 0), (1, 1))
    plain = course(pair, rows)
    matched = replace(plain, objective=Objective(blocks=5.0), matched=both)
    apart = (matched.held_loss() - plain.held_loss()) / 5.0
    with torch.no_grad():
        few = plain.held
        ours, theirs = (
            x.watched(few.ids, None, [0, 1])[1] for x in (plain.student, pair.teacher())
        )
    shares = [
        ((a - b).norm(dim=-1) / b.norm(dim=-1)).square().mean()
        for a, b in zip(ours, theirs, strict=True)
    ]
    assert apart == pytest.approx(float(sum(shares) / 2), rel=1e-4)
    learned = train(matched, replace(SHORT, steps=8), FP32)
    assert learned.end < learned.start
    assert matched.held_loss() - plain.held_loss() < 5.0 * apart


def test_a_cache_teaches_as_well(pair: Pair, rows: TokenRows, tmp_path: Path) -> None:
    """Of the 40 likeliest of 256 tokens; measured against the whole teacher."""
    judged = course(pair, rows)
    cache = open_cache(tmp_path, (24, 12), 40, tiny_models.VOCAB)
    source = pair.teacher()
    with torch.no_grad():
        cache.fill(0, source.hidden(rows.ids), source.head)
    before = judged.held_loss()
    assert replace(judged, teacher=cache).held_loss() < before
    train(replace(judged, teacher=cache), replace(SHORT, steps=12), FP32)
    assert judged.held_loss() < 0.85 * before


def test_rate_follows_the_damage_where_none_is_named(pair: Pair, rows: TokenRows) -> None:
    free = replace(SHORT, rate=None, steps=2)
    peaks = [
        max(point.rate for point in train(course(pair, rows, noise=n), free, FP32).curve)
        for n in (0.01, 0.05)
    ]
    assert 0 < peaks[0] < peaks[1]
