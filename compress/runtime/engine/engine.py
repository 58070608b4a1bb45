"""The engine: requests go in, each step computes some of their tokens, results come out.

A step is schedule → run → sample → commit. The tokens of a request depend on nothing but the
request: not on its neighbours, nor on how prompts are cut, blocks shared or sequences preempted.
One thread works with an engine; between two steps it may add and abort requests.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import monotonic

from compress.errors import RequestError
from compress.runtime.engine.arrivals import sequences_of
from compress.runtime.engine.commit import abort, accept, refused, result_of
from compress.runtime.engine.interfaces import StepInput, StepRunner
from compress.runtime.engine.policies import schedule
from compress.runtime.engine.refusals import ModelFacts, check_request
from compress.runtime.engine.scheduler import Scheduler
from compress.runtime.engine.step import Item, Step
from compress.runtime.sampling.head import LogitsRow, Sampler, choices, rows_at_once
from compress.runtime.sampling.sampling import Best, Choice, sample
from compress.runtime.sequences.limits import Limits, check_limits
from compress.runtime.sequences.request import Request, RequestResult, Update
from compress.runtime.sequences.sequence import Sequence
from compress.runtime.sequences.stops import Decode, with_single_texts
from compress.runtime.sequences.tables import BlockTables


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine began.

    computed: tokens that went through the decoder. queried, hit: tokens of prompts, and those of
    them that the prefix cache had. running: sequences that had blocks at once, at most. held:
    blocks of each group that sequences held at once, at most.
    """

    steps: int = 0
    computed: int = 0
    generated: int = 0
    finished: int = 0
    queried: int = 0
    hit: int = 0
    running: int = 0
    held: tuple[int, ...] = ()


class Engine:
    """runner: computes the steps. decode: ids -> text, special tokens left out; without it results
    have no text.

    reuse: requests that begin alike share keys and values. notices: settings without effect.
    """

    def __init__(
        self,
        runner: StepRunner,
        facts: ModelFacts,
        limits: Limits | None = None,
        *,
        decode: Decode | None = None,
        reuse: bool = True,
        sampler: Sampler = sample,
    ) -> None:
        limits = limits or Limits()
        self.notices = check_limits(limits)
        self.runner, self.layout = runner, runner.layout
        self.facts, self.limits = facts, limits
        self.decode = None if decode is None else with_single_texts(decode)
        self.sampler = sampler
        groups, size = self.layout.groups, self.layout.block_size
        self.tables = BlockTables(groups, size, limits.chunk(size), reuse)
        self.scheduler = Scheduler(limits, self.tables)
        self.stats = EngineStats()
        self._live: dict[str, list[Sequence]] = {}
        self._updates: list[Update] = []
        self._arrivals = 0
        self._most = rows_at_once(facts.vocabulary)

    @property
    def idle(self) -> bool:
        """No sequence runs or waits, and every update was handed out."""
        return not self._live and not self._updates

    @property
    def usage(self) -> float:
        """The part of the blocks that running sequences hold, in the fullest group."""
        return max(1 - pool.free / (pool.count - 1) for pool in self.tables.pools)

    def add(self, request: Request) -> None:
        """Errors: RequestError, with the numbers, where the request can never be served."""
        text = self.decode is not None
        check_request(request, self.facts, self.limits, self.tables, text=text)
        if request.id in self._live:
            raise RequestError(f"request {request.id!r} is being served: ids must differ")
        self._arrivals += 1
        groups = len(self.tables.groups)
        sequences = sequences_of(request, self._arrivals, self.facts, groups, self.decode)
        self._live[request.id] = sequences
        self.scheduler.add(sequences[0])

    def abort(self, name: str) -> bool:
        """Ends a request wherever it is; its results come with the next step. False: unknown."""
        sequences = list(self._live.get(name, ()))
        for sequence in sequences:
            abort(sequence)
            self._tell(sequence, monotonic())
        return bool(sequences)

    def step(self) -> list[Update]:
        """Computes one step; returns what came of it.

        Where runner or sampler raise (memory, Ctrl-C), the error passes on and no token is lost:
        the running sequences begin anew with the next step.
        """
        step = schedule(self.scheduler)
        if step.items:
            self._begin(step)
            try:
                outcomes = self._run(step)
            except BaseException:
                for sequence in list(self.scheduler.running):
                    self.scheduler.preempt(sequence)
                raise
            self._commit(step, outcomes)
        updates, self._updates = self._updates, []
        return updates

    def generate(self, requests: Iterable[Request]) -> list[RequestResult]:
        """Serves requests to their end; results in their order, then by index.

        What cannot be served has one result, with the error. Scores may be among them.
        """
        places: list[list[RequestResult]] = []
        results: dict[str, list[RequestResult]] = {}
        try:
            for request in requests:
                places.append([])
                try:
                    self.add(request)
                    results[request.id] = places[-1]
                except RequestError as error:
                    places[-1].append(refused(request, str(error), monotonic()))
            self._serve(results)
        except BaseException:
            for name in results:
                self.abort(name)
            raise
        return [r for place in places for r in sorted(place, key=lambda result: result.index)]

    def stream(self, request: Request) -> Iterator[Update]:
        """The updates of one request as they come; closing the iterator aborts it."""
        self.add(request)
        try:
            while request.id in self._live:
                self._updates = self.step()
                yield from self._taken(request.id)
            yield from self._taken(request.id)
        finally:
            if self.abort(request.id):
                self._taken(request.id)

    def _serve(self, results: dict[str, list[RequestResult]]) -> None:
        """Steps until the requests that results names are done; updates of others are kept."""
        others: list[Update] = []
        left = set(results)
        while left:
            for update in self.step():
                if update.id not in results:
                    others.append(update)
                elif update.result is not None:
                    results[update.id].append(update.result)
            left = {name for name in left if name in self._live}
        self._updates += others

    def _taken(self, name: str) -> list[Update]:
        """The updates of a request, no longer kept for others."""
        own = [update for update in self._updates if update.id == name]
        self._updates = [update for update in self._updates if update.id != name]
        return own

    def _begin(self, step: Step) -> None:
        stats = self.stats
        stats.running = max(stats.running, len(self.scheduler.running))
        held = [pool.count - 1 - pool.free for pool in self.tables.pools]
        stats.held = tuple(map(max, held, stats.held or held))
        for item in step.items:
            if item.sequence.times.scheduled is None:
                stats.queried += len(item.sequence.tokens)
                stats.hit += item.start
                item.sequence.times.scheduled, item.sequence.cached = monotonic(), item.start

    def _run(self, step: Step) -> list[tuple[LogitsRow, Choice | None]]:
        chunks = tuple([item.chunk for item in step.items])
        greedy = self.sampler is sample and all(item.sequence.greedy for item in step.items)
        found = self.runner.run(StepInput(step.copies, chunks, self.layout, self._most, greedy))
        rows = self._advance(step.items)
        if isinstance(found, Best):
            chosen = found.choices()
            return [(row, chosen[row.at]) for row in rows]
        return list(choices(found, rows, self.sampler))

    def _advance(self, items: tuple[Item, ...]) -> list[LogitsRow]:
        """Counts the tokens as computed; whose choice each row is. Whoever waited for a prompt
        that is now computed goes on from it, and its logits are theirs too."""
        rows: list[LogitsRow] = []
        index = 0
        for leader, _, end, wanted in items:
            leader.computed = end
            sharers = [leader]
            if leader.followers and end == leader.prompt_length:
                sharers += self.scheduler.fork(leader)
            for position in range(wanted, end):
                rows += [LogitsRow(index, sequence, position) for sequence in sharers]
                index += 1
        return rows

    def _commit(self, step: Step, outcomes: list[tuple[LogitsRow, Choice | None]]) -> None:
        now = monotonic()
        self.stats.steps += 1
        self.stats.computed += sum([item.tokens for item in step.items])
        touched = dict.fromkeys([item.sequence for item in step.items])
        for row, choice in outcomes:
            accept(row, choice, now)
            touched[row.sequence] = None
        for sequence in touched:
            self.tables.settle(sequence)
            self._tell(sequence, now)

    def _tell(self, sequence: Sequence, now: float) -> None:
        """Hands out what is new of a sequence; takes it out where it has ended."""
        result = None
        if sequence.finish_reason is not None:
            self._remove(sequence)
            result = result_of(sequence, now)
        tokens = () if sequence.scoring else tuple(sequence.tokens[sequence.told :])
        text = "" if sequence.writer is None else sequence.writer.take()
        if not (tokens or text or result):
            return
        sequence.told = len(sequence.tokens)
        self.stats.generated += len(tokens)
        name = sequence.request.id
        self._updates.append(Update(name, sequence.index, tokens, text, result))

    def _remove(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        for follower in sequence.followers:
            self.scheduler.add(follower)
        sequence.followers = []
        live = self._live[sequence.request.id]
        live.remove(sequence)
        if not live:
            del self._live[sequence.request.id]
        self.stats.finished += 1
