"""What is measured of a model's operations: which ones, that they are numbers, and their sums."""

from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.formats import open_weights
from compress.quant.scheme import PRESETS, QuantScheme
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.latent import LatentAttention
from compress.runtime.decoder.linear import Joint, Linear
from compress.runtime.decoder.mlp import Mixture, Mlp
from compress.runtime.decoder.norms import Norm
from compress.runtime.engine import engine as engine_module
from compress.runtime.engine.scheduler import Scheduler
from compress.runtime.engine.step import Step
from compress.runtime.forms.form import Arithmetic
from compress.speed import hollow as hollow_module
from compress.speed import looks as looks_module
from compress.speed import rates as rates_module
from compress.speed import timer as timer_module
from compress.speed.products import workload_of
from compress.speed.rates import calibrate
from compress.speed.roofline import Curve, EngineRates, Hardware
from compress.speed.timer import Timer, measure_machine
from compress.speed.workload import Workload
from compress_kernels.cpu.library import native
from compress_kernels.cpu.program import Program
from compress_kernels.paged import TokenPlaces
from helpers import compressed_models, tiny_models

G4 = QuantScheme(bits=4, group_size=32)
G8 = QuantScheme(bits=4, group_size=8)  # no panels have groups of 8 columns


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured does not matter here."""
    monkeypatch.setattr(timer_module, "READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(timer_module, "SIDES", {"cpu": 64})
    monkeypatch.setattr(hollow_module, "ALL_PIECES", 1 << 20)
    monkeypatch.setattr(rates_module, "BURST", 0.0)


def curves(rates: EngineRates) -> list[Curve]:
    """Of all products, whatever a step reads."""
    return [curve for each in rates.products for _, curve in each.by_bytes]


def linears_of(decoder: Decoder) -> list[tuple[str, Linear]]:
    """Every product that a loaded decoder may carry out, with its part."""
    found = [("head", decoder.head)]
    for layer in decoder.layers:
        found += [("block", x) for x in (*layer.attention.qkv.linears, layer.attention.out)]
        mlps = layer.mlp.experts if isinstance(layer.mlp, Mixture) else (layer.mlp,)
        part = "expert" if isinstance(layer.mlp, Mixture) else "block"
        if isinstance(layer.mlp, Mixture):
            found.append(("block", layer.mlp.router))
        found += [(part, linear) for mlp in mlps for linear in _of_mlp(mlp)]
    return found


def _of_mlp(mlp: Mlp) -> list[Linear]:
    inner: Joint = mlp.inner
    return [*inner.linears, mlp.down]


def check_products(work: Workload, decoder: Decoder) -> None:
    loaded = sorted(
        (part, tuple(x.weight.shape), x.weight.nbytes) for part, x in linears_of(decoder)
    )
    described = sorted((p.part, p.shape, p.nbytes) for p in work.products for _ in range(p.count))
    assert described == loaded


@pytest.mark.parametrize("family", tiny_models.TABLED)
def test_products_are_those_of_the_loaded_decoder(family: str, tmp_path: Path) -> None:
    weights = open_weights(Checkpoint.open(tiny_models.make(family, tmp_path, dtype="fp32")))
    work, decoder = (
        workload_of(weights, dtype=torch.bfloat16),
        Decoder.load(weights, dtype=torch.bfloat16),
    )
    check_products(work, decoder)
    (attention,) = work.attention
    assert attention.windows == tuple(layer.window for layer in decoder.how.layers)
    layer = decoder.how.grouped(0)
    per_token = 2 * layer.kv_heads * layer.key_width * 2
    assert work.kv_bytes_per_token == len(decoder.layers) * per_token
    mixture = family in tiny_models.MIXTURES
    assert work.chosen == (2 if mixture else 0)
    assert {p.experts for p in work.products if p.part == "expert"} == ({4} if mixture else set())


@pytest.mark.parametrize(("scheme", "rank"), [(None, None), (G4, 24)], ids=["dense", "g4"])
def test_latent_attention_multiplies_what_its_linears_hold(
    rank: int | None, scheme: QuantScheme | None, tmp_path: Path
) -> None:
    """Keys and values of latents are cut by heads, and dense."""
    folder = tiny_models.make("deepseek_v3", tmp_path / "a", dtype="fp32", q_lora_rank=rank)
    if scheme is not None:
        compressed_models.write(folder, tmp_path / "b", scheme)
        folder = tmp_path / "b"
    weights = open_weights(Checkpoint.open(folder))
    work = workload_of(weights, dtype=torch.float32)
    held = 0
    for layer in Decoder.load(weights).layers:
        attention = layer.attention
        assert isinstance(attention, LatentAttention)
        cut = attention.unfolding
        linears = [*attention.entering.linears, attention.out]
        held += cut.keys.nbytes + cut.values.nbytes
        linears += [attention.queries[1]] if attention.queries is not None else []
        held += sum(x.weight.nbytes for x in (*linears, *_of_mlp(layer.mlp)))
    assert sum(p.nbytes * p.count for p in work.products if p.part == "block") == held
    unfolding = [p for p in work.products if p.shape == (4 * (16 + 16), 32)]
    assert [(p.stored, p.count) for p in unfolding] == [("dense", 2)]
    (attended,) = work.attention
    assert attended.products == 4 * (32 + 8 + 32)
    assert work.kv_bytes_per_token == 2 * (32 + 8) * 4


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize(
    "scheme", [G4, PRESETS["W8A8"], PRESETS["NVFP4A16"], G8], ids=["g4", "w8a8", "fp4", "g8"]
)
def test_packed_products_are_those_of_the_loaded_decoder(
    scheme: QuantScheme, family: str, tmp_path: Path
) -> None:
    source = tiny_models.make(family, tmp_path / "source", dtype="fp32")
    compressed_models.write(source, tmp_path / "out", scheme)
    weights = open_weights(Checkpoint.open(tmp_path / "out"))
    work = workload_of(weights, dtype=torch.float32)
    check_products(work, Decoder.load(weights))
    decoded = "decoded " * (scheme is G8)
    assert {p.stored for p in work.products} >= {"dense", decoded + scheme.describe()}


def test_a_tied_head_is_one_tensor(tmp_path: Path) -> None:
    made = {
        tied: workload_of(
            open_weights(
                Checkpoint.open(tiny_models.make("llama", tmp_path / str(tied), tied=tied))
            ),
            dtype=torch.bfloat16,
        )
        for tied in (True, False)
    }
    assert made[True].products == made[False].products
    assert made[False].weight_bytes - made[True].weight_bytes == 256 * 64 * 2


def test_int8_keys_and_values_have_scales(tmp_path: Path) -> None:
    weights = open_weights(Checkpoint.open(tiny_models.make("llama", tmp_path)))
    work = workload_of(weights, dtype=torch.float32, kv_dtype=torch.int8)
    assert work.attention[0].state_bytes == 2 * 2 * (16 + 2)


@pytest.mark.parametrize(
    ("family", "kv"),
    [("llama", None), ("qwen3_moe", None), ("gemma2", torch.int8), ("gpt2", torch.bfloat16)],
    ids=lambda x: str(x),
)
def test_rates_are_numbers(family: str, kv: torch.dtype | None, tmp_path: Path) -> None:
    weights = open_weights(Checkpoint.open(tiny_models.make(family, tmp_path)))
    found = calibrate(weights, kv_dtype=kv, timer=Timer(torch.device("cpu"), runs=2))
    rates = found.rates
    assert len(rates.products) == len(found.work.products)
    for curve in (*curves(rates), rates.between, rates.host):
        seconds = [y for _, y in curve.points]
        assert all(isfinite(y) and y > 0 for y in seconds)
        assert seconds == sorted(seconds)
    (looks,) = rates.looks
    assert [x for x, _ in looks.single.points] == list(looks_module.CACHE_BYTES)
    assert all(isfinite(y) and y >= 0 for _, y in looks.single.points)
    assert looks.several > 0
    assert not rates.tiled


def test_sixteens_of_rows_where_torch_multiplies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates_module, "row_multiple", lambda *_: 16)
    weights = open_weights(Checkpoint.open(tiny_models.make("llama", tmp_path)))
    timer = Timer(torch.device("cpu"), runs=1)
    rates = calibrate(weights, how=Arithmetic.here(torch.float16, "cpu"), timer=timer).rates
    assert rates.multiple == 16
    assert {x for curve in curves(rates) for x, _ in curve.points} == {16, 32, 64, 128, 256}


@pytest.fixture(params=["one call", "op by op"])
def in_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether steps are one call; where nothing was compiled none is."""
    if request.param == "op by op":
        monkeypatch.setattr(rates_module, "are_calls", lambda *_: False)
    elif native().library is None:
        pytest.skip(native().reason)
    return bool(request.param == "one call")


@pytest.mark.usefixtures("in_calls")
def test_a_part_of_a_large_weight_stands_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is counted in weights: whatever part is measured, the whole comes out."""
    source = tiny_models.make("llama", tmp_path / "source", dtype="fp32", intermediate_size=512)
    compressed_models.write(source, tmp_path / "out", G4)
    weights = open_weights(Checkpoint.open(tmp_path / "out"))
    counted = 0

    def count(self: Linear, x: torch.Tensor) -> torch.Tensor:
        nonlocal counted
        n, k = self.weight.shape
        counted += n * k * len(x)
        return x.new_zeros(len(x), n)

    def count_calls(self: Program) -> None:
        nonlocal counted
        rows = self.given[0]  # the first that the engine's programs are given
        for op in self.ops[: self.struct.call_count]:
            width = "inputs" if hasattr(op.about, "inputs") else "columns"
            counted += rows * getattr(op.about, "outputs", 0) * (getattr(op.about, width, 0) or 0)

    monkeypatch.setattr(Linear, "__call__", count)
    monkeypatch.setattr(Program, "again", count_calls)
    monkeypatch.setattr(rates_module, "MOST_WEIGHTS", 128 * 64)
    timer = Timer(torch.device("cpu"), clock=lambda: float(counted), runs=1)
    found = calibrate(weights, timer=timer, machine=Hardware(1.0, 1.0))
    for product, rates in zip(found.work.products, found.rates.products, strict=True):
        for _, curve in rates.by_bytes:
            assert [y for _, y in curve.points] == [product.weights * x for x, _ in curve.points]


class Counted:
    """A clock of work: what stands in for an operation tells how much it did."""

    def __init__(self) -> None:
        self.done = 0

    def add(self, count: int) -> None:
        self.done += count

    @property
    def timer(self) -> Timer:
        return Timer(torch.device("cpu"), clock=lambda: float(self.done), runs=1)


def rates_of(folder: Path, counted: Counted) -> EngineRates:
    weights = open_weights(Checkpoint.open(folder))
    return calibrate(weights, timer=counted.timer, machine=Hardware(1.0, 1.0)).rates


@pytest.mark.parametrize("window", [None, 12])
def test_attention_is_of_one_token_and_one_position(
    window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted()

    def attend(q: torch.Tensor, stored: Any, places: TokenPlaces, **options: Any) -> torch.Tensor:
        counted.add(int((places.positions + 1).sum()))
        return q

    monkeypatch.setattr(looks_module, "paged_attention", attend)
    family, options = ("llama", {}) if window is None else ("mistral", {"sliding_window": window})
    rates = rates_of(tiny_models.make(family, tmp_path, dtype="fp32", **options), counted)
    (looks,) = rates.looks
    assert [y for _, y in looks.single.points] == [1.0] * len(looks_module.CACHE_BYTES)
    assert looks.several == 1.0


@pytest.mark.parametrize("kv", [torch.float32, torch.int8], ids=str)
def test_attention_reads_memory_that_was_written(
    kv: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that nobody wrote are one page, whatever their number; and blocks lie anywhere."""
    ordered = []

    def attend(q: torch.Tensor, stored: Any, places: TokenPlaces, **options: Any) -> torch.Tensor:
        for states in (stored.keys, stored.values):
            assert states.flatten(1).any(dim=1).all()
        blocks = places.table.flatten().tolist()
        assert sorted(blocks) == list(range(1, len(stored.keys)))
        ordered.append(blocks == sorted(blocks))
        return q

    monkeypatch.setattr(looks_module, "paged_attention", attend)
    weights = open_weights(Checkpoint.open(tiny_models.make("llama", tmp_path, dtype="fp32")))
    timer = Timer(torch.device("cpu"), runs=1)
    calibrate(weights, kv_dtype=kv, timer=timer, machine=Hardware(1.0, 1.0))
    assert not all(ordered)


@pytest.mark.usefixtures("in_calls")
def test_what_stands_between_products_is_all_but_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of norms count, in every layer; what is read in place of weights does not."""
    counted = Counted()
    norm, total = Norm.__call__, torch.Tensor.sum

    def normed(self: Norm, x: torch.Tensor) -> torch.Tensor:
        counted.add(len(x))
        return norm(self, x)

    def summed(self: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        counted.add(10**6)
        return total(self, *others, **options)

    def called(self: Program) -> None:
        ops = self.ops[: self.struct.call_count]
        counted.add(self.given[0] * sum(op.function == "rms_norm" for op in ops))

    monkeypatch.setattr(Norm, "__call__", normed)
    monkeypatch.setattr(Program, "again", called)
    monkeypatch.setattr(torch.Tensor, "sum", summed)
    rates = rates_of(tiny_models.make("llama", tmp_path, dtype="fp32"), counted)
    norms = 2 * 2 + 1
    assert [y / x for x, y in rates.between.points] == [norms] * len(rates.between.points)


@pytest.mark.usefixtures("in_calls")
def test_planning_is_all_but_the_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    forward, schedule = Decoder.forward, engine_module.schedule

    def computed(self: Decoder, *arguments: Any) -> torch.Tensor:
        counted.add(10**6)
        return forward(self, *arguments)

    def planned(scheduler: Scheduler) -> Step:
        counted.add(7)
        return schedule(scheduler)

    monkeypatch.setattr(Decoder, "forward", computed)
    monkeypatch.setattr(engine_module, "schedule", planned)
    rates = rates_of(tiny_models.make("llama", tmp_path, dtype="fp32"), counted)
    assert {y for _, y in rates.host.points} == {7.0}


def test_the_machine_has_numbers() -> None:
    found = measure_machine(torch.float32, Timer(torch.device("cpu"), runs=1))
    assert 0 < found.bandwidth < float("inf")
    assert 0 < found.flops < float("inf")
    assert found.free_bytes is None or found.free_bytes > 0


def test_a_decoder_in_no_table_is_refused(tmp_path: Path) -> None:
    weights = open_weights(Checkpoint.open(tiny_models.make("granite", tmp_path)))
    with pytest.raises(CheckpointError, match="'granite' is in no table of forwards"):
        calibrate(weights)


def test_a_timer_takes_the_median_behind_a_first_run() -> None:
    ticks = iter([0.0, 100.0, 0.0, 5.0, 0.0, 1.0, 0.0, 3.0])
    timer = Timer(torch.device("cpu"), clock=lambda: next(ticks), runs=3)
    assert timer.seconds(lambda: None) == 3.0


def test_the_least_of_calls_that_take_turns() -> None:
    order: list[str] = []
    ticks = iter([0.0, 1.0, 0.0, 2.0, 0.0, 9.0, 0.0, 4.0, 0.0, 7.0, 0.0, 8.0])
    timer = Timer(torch.device("cpu"), clock=lambda: next(ticks), runs=2)
    assert timer.least([lambda: order.append("a"), lambda: order.append("b")]) == 4.0
    assert order == ["a", "b"] * 3
