"""The policy "separate" against text-generation-inference's loop, written down once more here."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.runtime.engine.engine import Engine
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request, Sampling
from helpers.engine.fake_decoder import engine_with

SIZE = 4
# What a step did: "prompt" or "output", and for whom.
Operation = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Job:
    name: str
    arrival: int
    prompt: int
    most: int

    @property
    def blocks(self) -> int:
        return -(-(self.prompt + self.most - 1) // SIZE)


@dataclass
class Router:
    """batching_task() and next_batch() of the router, version 2, with paged memory."""

    jobs: list[Job]
    limits: Limits
    blocks: int
    queue: list[Job] = field(default_factory=list)
    batch: dict[str, int] = field(default_factory=dict)
    done: list[Operation] = field(default_factory=list)

    def play(self) -> list[Operation]:
        last = max(job.arrival for job in self.jobs)
        self.arrive()
        while self.queue or len(self.done) <= last:
            taken = self.next_batch(None)
            if not taken:
                self.operate("idle", [])
                continue
            self.prompt(taken)
            waiting_tokens = 1
            while self.batch:
                waited = waiting_tokens >= self.limits.max_waiting_steps
                least = int(len(self.batch) * self.limits.waiting_served_ratio)
                taken = self.next_batch(None if waited else least)
                if taken:
                    self.prompt(taken)
                    waiting_tokens = 1
                self.output()
                waiting_tokens += 1
        return [operation for operation in self.done if operation[0] != "idle"]

    def next_batch(self, least: int | None) -> list[Job]:
        if not self.queue or (least is not None and len(self.queue) < least):
            return []
        budget = -(-self.limits.tokens_per_step // SIZE) * SIZE
        held = sum(job.blocks for job in self.jobs if job.name in self.batch)
        taken: list[Job] = []
        for job in self.queue:
            tokens = sum(other.prompt for other in taken) + job.prompt
            blocks = held + sum(other.blocks for other in taken) + job.blocks
            full = len(self.batch) + len(taken) == self.limits.sequences
            if tokens > budget or blocks > self.blocks or full:
                break
            taken.append(job)
        if least is not None and len(taken) < least:
            return []
        del self.queue[: len(taken)]
        return taken

    def prompt(self, taken: list[Job]) -> None:
        self.batch |= {job.name: job.most for job in taken}
        self.operate("prompt", [job.name for job in taken])

    def output(self) -> None:
        self.operate("output", list(self.batch))

    def operate(self, kind: str, names: list[str]) -> None:
        if names or kind == "idle":
            self.done.append((kind, tuple(sorted(names))))
            for name in names:
                self.batch[name] -= 1
            self.batch = {name: left for name, left in self.batch.items() if left}
            self.arrive()

    def arrive(self) -> None:
        """What arrives while an operation goes on is in the queue behind it."""
        self.queue += [job for job in self.jobs if job.arrival == len(self.done)]


def operations(engine: Engine, jobs: list[Job]) -> list[Operation]:
    """What the engine does, read from the tokens that it hands out."""
    begun: set[str] = set()
    found: list[Operation] = []
    step = 0
    while not engine.idle or step <= max(job.arrival for job in jobs):
        for job in jobs:
            if job.arrival == step:
                prompt = tuple(i % 23 for i in range(job.prompt))
                engine.add(Request(job.name, prompt, Sampling(max_tokens=job.most)))
        names = {update.id for update in engine.step()}
        first = names - begun
        begun |= names
        assert first in (names, set()), "a step of prompts and outputs"
        if names:
            found.append(("prompt" if first else "output", tuple(sorted(names))))
        step += 1
    return found


def same(jobs: list[Job], limits: Limits, blocks: int = 200) -> list[Operation]:
    expected = Router(jobs, limits, blocks).play()
    engine = engine_with(blocks, SIZE, limits, reuse=False)
    assert operations(engine, jobs) == expected
    assert engine.scheduler.preemptions == 0
    return expected


@pytest.mark.parametrize(
    ("running", "waiting", "ratio", "held"),
    [
        (3, 1, 0.3, False),
        (4, 1, 0.3, False),
        (6, 1, 0.3, False),
        (7, 1, 0.3, True),
        (7, 2, 0.3, False),
        (10, 2, 0.3, True),
        (10, 3, 0.3, False),
        (5, 5, 1.2, True),
        (5, 6, 1.2, False),
        (9, 1, 0.0, False),
    ],
)
def test_so_many_must_wait(running: int, waiting: int, ratio: float, held: bool) -> None:
    """floor(running x ratio) of the queue come in together, or nobody does."""
    jobs = [Job(f"r{i}", 0, 2, 30) for i in range(running)]
    jobs += [Job(f"w{i}", 3, 2, 30) for i in range(waiting)]
    limits = Limits(policy="separate", waiting_served_ratio=ratio, sequences=64)
    done = same(jobs, limits)
    assert done[:3] == [("prompt", done[0][1]), *[("output", done[0][1])] * 2]
    assert done[3][0] == ("output" if held else "prompt")


@pytest.mark.parametrize("most_waiting", [0, 1, 2, 5, 20])
def test_nobody_waits_longer_than_max_waiting_steps(most_waiting: int) -> None:
    jobs = [Job(f"r{i}", 0, 2, 40) for i in range(7)] + [Job("w", 1, 2, 4)]
    limits = Limits(policy="separate", max_waiting_steps=most_waiting)
    done = same(jobs, limits)
    # The count begins at 1 with the prompts' step.
    assert done.index(("prompt", ("w",))) == max(1, most_waiting)


def test_after_idleness_prompts_may_follow_prompts_else_outputs_come_between() -> None:
    """The router looks at its queue right after the batch that ended its sleep."""
    jobs = [Job(name, arrival, 2, 20) for name, arrival in (("a", 0), ("b", 1), ("c", 2), ("d", 4))]
    kinds = [kind for kind, _ in same(jobs, Limits(policy="separate"))]
    assert kinds[:7] == ["prompt", "prompt", "output", "prompt", "output", "prompt", "output"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_step_is_the_routers(data: st.DataObject) -> None:
    limits = Limits(
        policy="separate",
        tokens_per_step=data.draw(st.sampled_from([10, 13, 40])),
        sequences=data.draw(st.sampled_from([2, 5, 50])),
        waiting_served_ratio=data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.2])),
        max_waiting_steps=data.draw(st.sampled_from([0, 1, 4, 20])),
    )
    shape = st.tuples(st.integers(0, 25), st.integers(1, 10), st.integers(1, 12))
    jobs = [
        Job(f"{i:02}", *numbers)
        for i, numbers in enumerate(sorted(data.draw(st.lists(shape, min_size=1, max_size=14))))
    ]
    same(jobs, limits, blocks=data.draw(st.sampled_from([6, 12, 100])))


def test_a_prompt_longer_than_a_step_takes_several_in_a_row() -> None:
    limits = Limits(policy="separate", tokens_per_step=8)
    engine = engine_with(limits=limits, reuse=False)
    engine.add(Request("running", (1, 2), Sampling(max_tokens=20)))
    engine.step()
    engine.add(Request("long", tuple(range(20)), Sampling(max_tokens=4)))
    engine.add(Request("behind", (5,), Sampling(max_tokens=4)))
    named = [{update.id for update in engine.step()} for _ in range(6)]
    assert named == [
        set(),
        set(),
        {"long"},
        {"running", "long"},
        {"behind"},
        {"running", "long", "behind"},
    ]


def test_other_policies_say_that_the_ratio_has_no_effect() -> None:
    engine = engine_with(limits=Limits(waiting_served_ratio=1.2))
    expected = "waiting_served_ratio 1.2 has no effect with policy 'mixed'; only 'separate' holds"
    assert engine.notices == (f"{expected} requests back",)
    assert engine_with(limits=Limits(policy="separate", waiting_served_ratio=1.2)).notices == ()
