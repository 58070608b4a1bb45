"""Who runs: the queues, and the blocks that go with them. Who goes first is in policies.py.

There is no phase. Each sequence has `goal` positions to compute and has computed some; a step takes
as many tokens of each as budget and blocks allow. Reading a prompt, writing an output, going on
behind a prefix that was cached and starting anew after a preemption are all that.

The order of arrival decides everything: the oldest goes first and is never preempted for another,
and the queue is not overtaken. So whoever fits into an empty cache gets to its end.
"""

from bisect import bisect_left, insort

from compress.runtime.engine.step import Draft
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.sequence import Sequence, Status
from compress.runtime.sequences.tables import BlockTables

# Of the blocks this part stays free when somebody is let in beside others, so that those have room
# for their next tokens.
WATERMARK = 0.01


class Scheduler:
    """Sequences in order of arrival: `waiting` hold no blocks, `running` do.

    waiting_steps and onboarded are the memory of the policy "separate".
    """

    def __init__(self, limits: Limits, tables: BlockTables) -> None:
        self.limits, self.tables = limits, tables
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.waiting_steps = 0
        self.onboarded = False
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, in whatever state it is, with all it holds."""
        if sequence.status is Status.WAITING:
            _take(self.waiting, sequence)
        elif sequence.status is Status.RUNNING:
            _take(self.running, sequence)
            self.tables.release(sequence)
        sequence.status = Status.FINISHED

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue without blocks: what was computed is computed anew later."""
        _take(self.running, sequence)
        self.tables.release(sequence)
        self.add(sequence)
        self.preemptions += 1

    def grow(self, draft: Draft, sequence: Sequence) -> None:
        """Puts the next tokens of a running sequence into the step.

        Where blocks lack, younger sequences are preempted, the youngest first. The youngest itself
        waits: it keeps what it has computed unless an older one needs the room.
        """
        count = min(sequence.pending, self.tables.chunk, draft.budget)
        if count < 1:
            return
        end = sequence.computed + count
        while not self.tables.fits(sequence, end):
            youngest = self.running[-1]
            if youngest is sequence:
                draft.stalled = True
                return
            self.preempt(youngest)
            draft.drop(youngest)
        draft.add(sequence, count, self.tables.extend(sequence, end))

    def admit(self, sequence: Sequence, *, whole: bool, watermark: float) -> bool:
        """Lets the first of the queue in, with its cached prefix, if it has room beside the others.

        whole: room for all it may ever need is asked, for it and the others; else for the tokens
        that are known. Alone it is always let in: what the cache cannot hold at all was refused
        when it came (refusals.py).
        """
        self.tables.attach(sequence)
        if self.running and not self._room(sequence, whole, watermark):
            self.tables.release(sequence)
            return False
        _take(self.waiting, sequence)
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_order)
        return True

    def withdraw(self, sequence: Sequence) -> None:
        """Undoes admit(), before the sequence was given anything but its prefix."""
        _take(self.running, sequence)
        self.tables.release(sequence)
        self.add(sequence)

    def fork(self, leader: Sequence) -> list[Sequence]:
        """The followers of a sequence whose prompt is computed begin; returns those that go on
        from it. The others find no place among the running, or differ from it in their root; they
        wait like any sequence, and find the prompt in the prefix cache.
        """
        forked = []
        for follower in leader.followers:
            if len(self.running) < self.limits.running and follower.root == leader.root:
                self.tables.fork(leader, follower)
                follower.logprobs = list(leader.logprobs)
                follower.times.scheduled = leader.times.scheduled
                follower.cached = leader.cached
                follower.status = Status.RUNNING
                insort(self.running, follower, key=_order)
                forked.append(follower)
            else:
                self.add(follower)
        leader.followers = []
        return forked

    def _room(self, sequence: Sequence, whole: bool, watermark: float) -> bool:
        everyone = [*self.running, sequence]
        for group, pool in enumerate(self.tables.pools):
            kept = int(watermark * pool.count)
            if sum(self._claim(group, s, whole) for s in everyone) > pool.free - kept:
                return False
        return True

    def _claim(self, group: int, sequence: Sequence, whole: bool) -> int:
        """Blocks that a sequence with its followers has yet to get."""
        if not whole:
            return self.tables.wanted(group, sequence, sequence.goal)
        own = self.tables.wanted(group, sequence, sequence.most)
        others = (self.tables.bound(group, follower.most) for follower in sequence.followers)
        return own + sum(others)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _take(queue: list[Sequence], sequence: Sequence) -> None:
    index = bisect_left(queue, sequence.order, key=_order)
    assert queue[index] is sequence
    del queue[index]
