"""Steps that are one call of compiled code, measured without their products.

The program is the engine's own, made of a decoder without weights; of its products none computes
anything. So its time is that of all that stands between them.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle

import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec
from compress.arch.spec import LinearSpec
from compress.formats import Weights
from compress.runtime.decoder.build import Loader
from compress.runtime.decoder.calls import add_call, highest_call, why_no_call
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.linear import Linear
from compress.runtime.decoder.linear_ops import linear_ops
from compress.runtime.decoder.one_call import BY_STEP, MOST, OneCallDecoder, in_one_call
from compress.runtime.decoder.scratch import Scratch
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.interfaces import StepInput, StepLayout
from compress.runtime.engine.refusals import ModelFacts
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.forms.dense import FloatWeight
from compress.runtime.forms.form import Arithmetic
from compress.runtime.sampling.sampling import Best
from compress.speed.hollow import (
    PROMPT,
    STEPS,
    MemoryReader,
    empty_embedding,
    first_tokens,
    requests,
)
from compress.speed.timer import TIMES, Timer
from compress_kernels.cpu.program import CompiledOp, Given, Program


@dataclass(frozen=True, slots=True, eq=False)
class _Empty(Loader):
    """Norms are read; products have no columns."""

    def linear(self, spec: LinearSpec) -> Linear:
        return self._of_no_columns(spec.shape[0])

    def dense(self, weight: Tensor) -> Linear:
        return self._of_no_columns(len(weight))

    def embedding(self, spec: LinearSpec, tied: bool) -> FloatWeight:
        return empty_embedding(self, spec)

    def _of_no_columns(self, outputs: int) -> Linear:
        return Linear(FloatWeight(torch.zeros(outputs, 0, dtype=self.dtype)))


@dataclass(frozen=True, slots=True, eq=False)
class CalledSteps:
    """The steps of a checkpoint that are one call, products left out.

    vocabulary: of its logits. total: bytes that a step of so many texts reads; they are read before
    each step that is measured, so that it finds in caches what it would find.
    """

    decoder: Decoder
    read: MemoryReader
    vocabulary: int
    total: Callable[[int], int]

    @classmethod
    def of(
        cls,
        weights: Weights,
        how: ForwardSpec,
        arithmetic: Arithmetic,
        read: MemoryReader,
        total: Callable[[int], int],
    ) -> "CalledSteps | None":
        """None where the engine runs steps op by op, whatever the products are."""
        decoder = Decoder.of(_Empty(weights, how, arithmetic))
        steps = cls(decoder, read, weights.spec.vocab, total)
        return steps if steps._called(1, 1) is not None else None

    def chooses(self, head: Linear) -> bool:
        """Whether a greedy step's choices are in its call. head: its product."""
        return self.decoder.how.final_softcap is None and why_no_call(head) is None

    def between(self, rows: int) -> float:
        """Seconds of all that stands between products in a step with the first token of each of so
        many texts. The head, and the choice behind it, are left out."""
        called = self._called(rows, 1)
        assert called is not None, "`of` has tried it"
        batch = first_tokens(self.decoder, rows)
        called.forward(batch, called.cache)
        found = []
        for _ in range(TIMES * self.read.timer.runs + 1):
            self.read.at_once(self.total(rows))
            found.append(self.read.without(called.program.again))
        return statistics.median(found[1:])

    def host(self, texts: int) -> float:
        """Seconds outside of compiled code, in a greedy step that adds a token to each of so many
        texts: scheduling, what the program is given, bookkeeping."""
        called = self._called(texts, PROMPT + STEPS)
        assert called is not None, "`of` has tried it"
        # Of its programs nothing, but where there is a choice one call that does nothing.
        choice = () if called.greedy is None else called.greedy.ops[len(called.program.ops) :][:1]
        greedy = Program.of(choice, BY_STEP) if choice else None
        planned = replace(called, program=Program.of((), BY_STEP), greedy=greedy)
        runner = LocalRunner(planned, called.cache, planned.best)
        found = []
        for _ in range(TIMES):
            facts = ModelFacts(PROMPT + STEPS, self.vocabulary)
            logits = torch.zeros(1, self.vocabulary)
            around = _AroundCall(runner, self.read, self.total(texts), logits)
            engine = Engine(around, facts, reuse=False)
            for request in requests(texts):
                engine.add(request)
            steps = []
            while not engine.idle:
                steps.append(self.read.without(engine.step))
            found += steps[1:-1]
        return statistics.median(found)

    def _called(self, texts: int, length: int) -> OneCallDecoder | None:
        """The engine's steps over a cache for so many texts of up to `length` tokens."""
        how = self.decoder.how
        blocks = [1 + texts] * len(how.windows)
        cache = KVCache(how, blocks, length, dtype=self.decoder.dtype, device=self.decoder.device)
        called = in_one_call(self.decoder, cache, MOST).decoder
        if called is not None:
            _leave_out_products((called.greedy or called.program).ops)
            for memory in called.scratch.buffers:
                memory.uniform_()  # so that a router sends tokens to all experts
        return called


def _leave_out_products(ops: Sequence[CompiledOp]) -> None:
    """Of these ops and those of experts: they have no outputs, and a column as they cannot do
    without."""
    for op in ops:
        if op.function in ("linear_rows", "pair_rows"):
            op.about.columns, op.about.outputs = 1, 0
        for program in op.keeps:
            if isinstance(program, Program):
                _leave_out_products(program.ops)


@dataclass(frozen=True, slots=True, eq=False)
class _AroundCall:
    """Steps before which `total` bytes are read, which counts for nothing. row: the logits of all
    where steps give logits, fp32 [1, vocabulary]."""

    inner: LocalRunner[KVCache]
    read: MemoryReader
    total: int
    row: Tensor

    @property
    def layout(self) -> StepLayout:
        return self.inner.layout

    def run(self, step: StepInput) -> Iterator[Tensor] | Best:
        self.read.at_once(self.total)
        found = self.inner.run(step)
        if isinstance(found, Best):
            return found
        rows = sum(chunk.start + len(chunk.ids) - chunk.wanted for chunk in step.chunks)
        return (self.row.expand(min(step.rows, rows - at), -1) for at in range(0, rows, step.rows))


@dataclass(frozen=True, slots=True, eq=False)
class CalledProducts:
    """Copies of one product as ops of programs.

    copies: the ops of each: the product, in front of it the rounding of its inputs where that is an
    op of its own, and behind a head the choice of the highest output. around: of several threads,
    ops in front of each and behind it, on the caller's core where a step's are: the first writes
    the rows anew, which the others must fetch, the second reads what these have made of them.
    Without the first one text of tale-6m was predicted to take 0.72 to 0.80 of its time, without
    the second one in int4 0.77 to 0.87, with both 0.88 to 1.04. Their own time counts for nothing.
    """

    copies: tuple[tuple[CompiledOp, ...], ...]
    around: tuple[tuple[CompiledOp, ...], tuple[CompiledOp, ...]] = ((), ())

    @classmethod
    def of(
        cls, linears: Sequence[Linear], rows: int, choose: bool, dtype: torch.dtype
    ) -> "CalledProducts":
        """linears: that why_no_call has nothing against. rows: at most. dtype: of the engine."""
        n, k = linears[0].weight.shape
        x, out = torch.rand(rows, k).to(dtype), torch.zeros(rows, n, dtype=dtype)
        index, values = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
        scratch, copies = Scratch(rows, k, dtype), []
        for linear in linears:
            choice = (highest_call(out, index, values, Given("rows")),) * choose
            copies.append((*linear_ops(linear, x, out, scratch), *choice))
        if torch.get_num_threads() == 1:
            return cls(tuple(copies))
        written = add_call(x.clone(), torch.zeros_like(x), x)
        read = add_call(out, torch.zeros_like(out), torch.zeros_like(out))
        # The choice behind a head reads all of its outputs.
        return cls(tuple(copies), ((written,), () if choose else (read,)))

    def seconds(self, rows: int, copies: int, timer: Timer, burst: float) -> float:
        """Of one product with so many rows. copies: that are gone through in turn, of the first;
        as many run in one call as take `burst` seconds.

        Each run goes on behind the last: runs that began with the first copy anew found it in
        caches (3072 x 1024 in 16 bits, 32 rows: 0.90 ms so, in turn 1.01; 8 rows 0.27 and 0.29).
        """
        before, behind = self.around
        parts = tuple((*before, *ops, *behind) for ops in self.copies)
        once = timer.every(_in_turn(parts[:copies], rows, timer.runs + 1))[-1]
        calls = min(copies, max(1, int(burst / TIMES / once) if once else 1))
        times = TIMES if once < burst else 1
        runs = times * timer.runs + 1
        joined = _in_calls(parts[:copies], calls)
        found = timer.seconds(_in_turn(joined, rows, runs), times) / calls
        if not before:
            return found
        others = _in_turn(((*before, *behind) * calls,), rows, 1)
        # Half: another program may have the cores just then, and no product takes no time.
        return max(found / 2, found - timer.seconds(others, times) / calls)


def _in_calls(
    parts: Sequence[tuple[CompiledOp, ...]], calls: int
) -> tuple[tuple[CompiledOp, ...], ...]:
    """So many of the parts as one; the last ones are left out where they are fewer."""
    starts = range(0, len(parts) - calls + 1, calls)
    return tuple(tuple(chain(*parts[at : at + calls])) for at in starts)


def _in_turn(parts: Sequence[tuple[CompiledOp, ...]], rows: int, runs: int) -> Callable[[], None]:
    """Runs one of the parts, and the next when it is called again. runs: of different ones, at
    most."""
    values = {"rows": rows, "wanted rows": rows, "threads": torch.get_num_threads()}
    programs = [Program.of(part, BY_STEP) for part in parts[:runs]]
    turn = cycle([(program, program.numbers(values)) for program in programs])

    def run() -> None:
        program, numbers = next(turn)
        program.run(numbers)

    return run
