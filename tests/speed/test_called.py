"""Steps in one call without their products: those of the engine, and nothing is multiplied."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
import torch

from compress.arch.forward.forward import describe_forward
from compress.checkpoint import Checkpoint
from compress.formats import Weights, open_weights
from compress.quant.scheme import PRESETS, QuantScheme
from compress.runtime.decoder.linear import load_linear
from compress.runtime.decoder.one_call import OneCallDecoder
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.forms.dense import FloatWeight
from compress.runtime.forms.form import Arithmetic
from compress.runtime.loading import room
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.speed import hollow as hollow_module
from compress.speed.called import CalledProducts, CalledSteps
from compress.speed.hollow import Hollow, MemoryReader
from compress.speed.products import workload_of
from compress.speed.rates import are_calls
from compress.speed.timer import TIMES, Timer
from compress_kernels.cpu.library import native
from compress_kernels.cpu.program import CompiledOp, Program
from compress_kernels.panels import Math
from helpers import compressed_models, tiny_models

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)
G4 = QuantScheme(bits=4, group_size=32)
G8 = QuantScheme(bits=4, group_size=8)  # no panels have groups of 8 columns


def called_steps(weights: Weights, math: Math = "exact") -> CalledSteps | None:
    """As `measure_rates` has them."""
    arithmetic = room.settled_arithmetic(weights, Arithmetic.here(torch.float32, "cpu", math))
    work = workload_of(weights, dtype=torch.float32, math=math)
    if not are_calls(weights, work, arithmetic):
        return None
    how = describe_forward(weights.checkpoint.config, weights.spec)
    read = MemoryReader.of(Timer(torch.device("cpu"), runs=1), 1 << 16)
    return CalledSteps.of(weights, how, arithmetic, read, lambda texts: 1 << 16)


def products(ops: Sequence[CompiledOp]) -> list[CompiledOp]:
    """Of ops and of those of experts."""
    inner = [
        x
        for op in ops
        for kept in op.keeps
        if isinstance(kept, Program)
        for x in products(kept.ops)
    ]
    return [op for op in ops if op.function == "linear_rows"] + inner


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "deepseek_v3", "gpt2"])
def test_ops_are_those_of_the_engine_but_for_products(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = open_weights(Checkpoint.open(tiny_models.make(family, tmp_path, dtype="fp32")))
    runner = open_engine(weights)[0].runner
    assert isinstance(runner, LocalRunner)
    assert isinstance(runner.decoder, OneCallDecoder)
    ran: list[Program] = []
    again = Program.again
    monkeypatch.setattr(Program, "again", lambda self: (ran.append(self), again(self))[1])
    steps = called_steps(weights)
    assert steps is not None
    assert steps.between(3) > 0
    program = ran[-1]
    assert all((x.about.outputs, x.about.columns) == (0, 1) for x in products(program.ops))
    others = [
        [op.function for op in each.ops if op.function != "linear_rows"]
        for each in (program, runner.decoder.program)
    ]
    assert others[0] == others[1]
    assert steps.host(2) > 0
    assert steps.host(1) > 0


@pytest.mark.parametrize(
    ("scheme", "math"),
    [
        (G4, "exact"),
        (G4, "int16"),
        (PRESETS["W8A8"], "int8"),
        (PRESETS["W8A8"], "exact"),
        (G8, "exact"),
    ],
    ids=["exact", "int16", "w8a8", "w8a8 exact", "decoded"],
)
def test_a_step_is_one_call_where_it_is_in_the_engine(
    scheme: QuantScheme, math: Math, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes that no product reads are decoded once; for every product they need several calls."""
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp32")
    compressed_models.write(source, tmp_path / "out", scheme)
    weights = open_weights(Checkpoint.open(tmp_path / "out"))
    runner = open_engine(weights, Opening(math=math))[0].runner
    assert isinstance(runner, LocalRunner)
    assert isinstance(runner.decoder, OneCallDecoder)
    assert called_steps(weights, math) is not None
    monkeypatch.setattr(room, "MOST_DECODED", 0)
    monkeypatch.setattr(room, "DECODED_SHARE", 0.0)
    short = open_engine(weights, Opening(math=math))[0].runner
    assert isinstance(short, LocalRunner)
    one = scheme is not G8
    assert isinstance(short.decoder, OneCallDecoder) == one
    assert (called_steps(weights, math) is not None) == one


@pytest.mark.parametrize(
    ("scheme", "math", "ops"),
    [("FP8_DYNAMIC", "exact", 2), ("W8A8", "exact", 2), ("W8A8", "int8", 1), ("W8A16", "exact", 1)],
)
def test_a_product_has_the_rounding_of_its_inputs(
    scheme: str, math: Math, ops: int, tmp_path: Path
) -> None:
    """Behind a head also the choice."""
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp32")
    compressed_models.write(source, tmp_path / "out", PRESETS[scheme])
    weights = open_weights(Checkpoint.open(tmp_path / "out"))
    spec = weights.spec.blocks[0].linears[0]
    linear = load_linear(weights, spec, Arithmetic.here(torch.float32, "cpu", math))
    for choose in (False, True):
        made = CalledProducts.of([linear, linear], 3, choose, torch.float32)
        assert [len(x) for x in made.copies] == [ops + choose] * 2


@pytest.mark.parametrize(("seconds", "together"), [(1.0, 1), (0.001, 2)])
def test_each_run_of_copies_goes_on_behind_the_last(
    seconds: float, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many at once as fill a burst; what was read long ago alone is read again."""
    weights = open_weights(Checkpoint.open(tiny_models.make("llama", tmp_path, dtype="fp32")))
    spec, now = weights.spec.blocks[0].linears[0], 0.0
    linear = load_linear(weights, spec, Arithmetic.here(torch.float32, "cpu", "exact"))
    made = CalledProducts.of([linear] * 7, 3, choose=False, dtype=torch.float32)
    made = replace(made, around=((), ()))
    order: list[list[int]] = []

    def run(self: Program) -> None:
        nonlocal now
        ops = self.ops[: self.struct.call_count]
        now += len(ops) * seconds
        order.append([made.copies.index((op,)) for op in ops])

    monkeypatch.setattr(Program, "again", run)
    timer = Timer(torch.device("cpu"), clock=lambda: now, runs=3)
    found = made.seconds(3, copies=6, timer=timer, burst=2 * TIMES * 0.001)
    assert found == pytest.approx(seconds)
    assert order[:4] == [[0], [1], [2], [3]]
    turn = [list(range(at, at + together)) for at in range(0, 6, together)]
    assert order[4:] == list(islice(cycle(turn), len(order) - 4))


@pytest.mark.parametrize("choose", [False, True])
def test_rows_are_written_and_read_for_threads_and_that_does_not_count(
    choose: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = open_weights(Checkpoint.open(tiny_models.make("llama", tmp_path, dtype="fp32")))
    spec, now = weights.spec.blocks[0].linears[0], 0.0
    linear = load_linear(weights, spec, Arithmetic.here(torch.float32, "cpu", "exact"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    made = CalledProducts.of([linear] * 7, 3, choose, dtype=torch.float32)
    seen = set()

    def run(self: Program) -> None:
        nonlocal now
        functions = tuple(op.function for op in self.ops)
        seen.add(functions[:3])
        now += sum(0.001 if function == "add_rows" else 0.004 for function in functions)

    monkeypatch.setattr(Program, "again", run)
    timer = Timer(torch.device("cpu"), clock=lambda: now, runs=3)
    found = made.seconds(3, copies=6, timer=timer, burst=0.001)
    behind = "highest_of_rows" if choose else "add_rows"
    assert found == pytest.approx(0.008 if choose else 0.004)
    others = ("add_rows",) if choose else ("add_rows", "add_rows")
    assert seen == {("add_rows", "linear_rows", behind), others}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_embedding_is_one_row(dtype: torch.dtype, tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path, dtype="bf16", tied=True)
    weights = open_weights(Checkpoint.open(source))
    how = describe_forward(weights.checkpoint.config, weights.spec)
    read = MemoryReader.of(Timer(torch.device("cpu"), runs=1), 1 << 16)
    hollow = Hollow.of(weights, how, Arithmetic.here(dtype, "cpu", "exact"), 4, read)
    embedding = hollow.decoder.embedding
    assert isinstance(embedding, FloatWeight)
    assert embedding.values.untyped_storage().nbytes() == 2 * embedding.shape[1]


def test_a_reader_reads_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more than what no cache holds; its time counts for nothing."""
    monkeypatch.setattr(hollow_module, "ALL_PIECES", 64)
    read: list[int] = []
    monkeypatch.setattr(np, "sum", lambda array: read.append(array.nbytes))
    reader = MemoryReader.of(Timer(torch.device("cpu"), lambda: float(len(read))), 1000)
    assert reader.without(lambda: [reader.at_once(n) for n in (8, 64, 4000)]) == 0
    assert read == [8, 64, 64]
