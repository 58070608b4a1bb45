"""Several ranks make what one makes: each with a share of the rows, in threads of one process."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, token_batches, walk
from compress.checkpoint import Checkpoint, ShardWriter, disk
from compress.formats import open_weights
from compress.passes import outliers
from compress.passes.context import PassContext
from compress.passes.journal import LOADS, Journal, PassJournal
from compress.passes.quantize import calibrated, stream
from compress.passes.quantize.observe import input_stats
from compress.passes.ranks import Ranks, largest
from compress.passes.structure import learned
from compress.passes.structure.change import LearnedPass
from compress.passes.units import EMBED
from compress.plan.passes import PassPlan
from compress.recipe import Recipe
from compress.report.schema import Report
from compress.runs import apply_pass
from compress.verbs import RunOptions, run
from compress_calibration.hessian import InputStats
from helpers import faults, tiny_models
from helpers.short_runs import SELF, recipe, text_source

T = TypeVar("T")
WAIT = 60.0  # seconds, for no test to hang; nobody waits so long unless another rank is gone
W4 = {"bits": 4, "granularity": "group", "group_size": 16}
GPTQ = {"method": "gptq", "scheme": W4}
HEADED = {"targets": ["*"], "ignore": ["router"]}


@dataclass
class Table:
    """Where ranks meet. Between two meetings one thread works at a time, as transformers' building
    of a model is not for several."""

    size: int
    working: threading.Lock = field(default_factory=threading.Lock)
    given: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.door = threading.Barrier(self.size, timeout=WAIT)

    def meet(self, rank: int, value: Any) -> list[Any]:
        """What each rank has brought, on all of them."""
        self.given[rank] = value
        self.wait()
        found = [self.given[i] for i in range(self.size)]
        self.wait()  # before anyone brings the next
        return found

    def wait(self) -> None:
        self.working.release()
        try:
            self.door.wait()
        finally:
            self.working.acquire()

    def run(self, work: Callable[[Ranks], T]) -> list[T]:
        """What each rank makes; the first error of any that is no broken door."""
        made: dict[int, T] = {}
        errors: list[BaseException] = []

        def be(rank: int) -> None:
            with self.working:
                try:
                    made[rank] = work(Seat(self, rank))
                except BaseException as error:
                    errors.append(error)
                    self.door.abort()

        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [made[rank] for rank in range(self.size)]


@dataclass(frozen=True)
class Seat:
    """A rank at the table."""

    table: Table
    rank: int

    @property
    def size(self) -> int:
        return self.table.size

    def sum(self, x: Tensor) -> Tensor:
        # A copy: what others brought may be used up while this one still reads.
        return torch.stack(self.table.meet(self.rank, x.clone())).sum(0)

    def broadcast(self, value: T | None, source: int) -> T:
        found: T | None = self.table.meet(self.rank, value)[source]
        assert found is not None
        return found

    def barrier(self) -> None:
        self.table.meet(self.rank, None)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_shares_of_rows_sum_to_all(tiny: Callable[..., Path], tmp_path: Path, family: str) -> None:
    """Hessians, token counts, largest and mean magnitudes of a block, padding left out."""
    source = tiny(family, dtype="fp32")
    ids = torch.randint(1, tiny_models.VOCAB, (7, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 3:] = False

    def seen(ranks: Ranks) -> dict[str, InputStats]:
        weights = open_weights(Checkpoint.open(source))
        skeleton = Skeleton(weights.checkpoint.config, weights.spec, dtype=torch.float32)
        batches = token_batches(ids, mask, 2)
        shapes = [(*batch.ids.shape, weights.spec.hidden) for batch in batches]
        # As in a run: the states of all ranks are in one file, each in its place.
        states = HiddenStates(tmp_path / f"hidden.of{ranks.size}", shapes, torch.float32)
        share = batches[ranks.rank :: ranks.size]
        chain = Chain(skeleton, weights, share, (states,))
        chain.embed()
        block = next(walk(chain))
        linears = [x for x in block.spec.linears if x.role != "router"]
        return input_stats(block, linears, magnitudes=True, ranks=ranks)

    (one,) = Table(1).run(seen)
    for found in Table(3).run(seen):
        assert found.keys() == one.keys()
        for key, stats in one.items():
            assert found[key].tokens == stats.tokens
            torch.testing.assert_close(found[key].hessian, stats.hessian, rtol=1e-5, atol=1e-7)
            assert torch.equal(found[key].absmax, stats.absmax)
            torch.testing.assert_close(found[key].absmean, stats.absmean, rtol=1e-5, atol=1e-7)
    assert sum(stats.tokens for stats in one.values()) > 0


def test_the_largest_keeps_what_is_not_finite() -> None:
    values = torch.tensor([[1.0, float("nan"), 2.0], [3.0, 0.0, float("inf")]])
    for found in Table(2).run(lambda ranks: largest(ranks, values[ranks.rank])):
        assert str(found.tolist()) == "[3.0, nan, inf]"


@dataclass
class Runs:
    """Runs in which several ranks do the passes. journals: of each rank, after the last pass."""

    folder: Path
    size: int = 2
    journals: list[PassJournal] = field(default_factory=list)

    def of(self, ranks: Ranks, work: PassContext, go: Callable[[PassContext], None]) -> PassJournal:
        """A pass as one rank sees it; only rank 0 has a journal on the disk."""
        journal, writer = work.journal, work.writer
        if ranks.rank:
            nowhere = self.folder / "nowhere" / "journal.json"
            passes, journal = (
                journal.journal.passes,
                PassJournal(Journal(nowhere, {}, "cpu"), dict(journal.units)),
            )
            of_all = {
                name: journal if each is work.journal else each for name, each in passes.items()
            }
            journal.journal.passes.update(of_all)
            writer = ShardWriter.reopen(writer.folder, writer.layout)
        go(replace(work, journal=journal, writer=writer, ranks=ranks))
        return journal

    def shared(self, work: PassContext, go: Callable[[PassContext], None]) -> None:
        self.journals = Table(self.size).run(lambda ranks: self.of(ranks, work, go))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    found = Runs(tmp_path)
    alone, streamed, edited = calibrated.calibrate, stream.run, apply_pass.apply_edit

    def calibrate(work: PassContext, folder: Path) -> None:
        found.shared(work, lambda mine: alone(mine, folder))

    monkeypatch.setattr(calibrated, "calibrate", calibrate)

    def edit(work: PassContext, planned: PassPlan) -> None:
        found.shared(work, lambda mine: edited(mine, planned))

    monkeypatch.setattr(stream, "run", lambda work: found.shared(work, streamed))
    monkeypatch.setattr(apply_pass, "apply_edit", edit)
    changed = learned.apply_learned

    def change(each: LearnedPass) -> None:
        found.shared(each.work, lambda mine: changed(replace(each, work=mine)))

    monkeypatch.setattr(learned, "apply_learned", change)
    return found


FIXED = {
    "bits": 8,
    "granularity": "channel",
    "activation": {"outliers": "calibrated", "threshold": 2.0},
}
Case = tuple[str, list[dict[str, Any]], dict[str, Any]]
OWN = {"calibration": {**SELF, "samples": 6}}  # rows that differ, so that one has the largest key
CASES: dict[str, Case] = {
    "gptq": ("llama", [{**GPTQ, **HEADED}], {}),
    "experts": ("mixtral", [GPTQ], {}),
    "no table": ("granite", [GPTQ], {}),
    "folds": ("llama", [{"method": "awq", "grid": 5}, GPTQ], {}),
    "outliers": (
        "llama",
        [{"method": "llm_int8", "scheme": FIXED}],
        {},
    ),
    "static": ("llama", [{"method": "fp8", "scheme": "FP8"}], {"kv_cache": "fp8", **OWN}),
}


SOME = ("experts", "folds")


@pytest.mark.parametrize(
    "name", [x if x in SOME else pytest.param(x, marks=pytest.mark.long) for x in CASES]
)
def test_ranks_make_the_result_of_one(
    tiny: Callable[..., Path], tmp_path: Path, runs: Runs, name: str
) -> None:
    """But for what the order of sums changes in the last bits: a few codes between two values."""
    family, stages, rest = CASES[name]
    asked = recipe(*stages, **{"calibration": text_source(tmp_path, samples=6), **rest})
    reports = []
    for runs.size, out in ((1, "one"), (2, "two"), (4, "four")):
        options = RunOptions(dtype="fp32")
        reports.append(run(asked, tiny(family, dtype="fp32"), tmp_path / out, options=options))
        first, *others = (journal.units for journal in runs.journals)
        assert all(units == first for units in others)
    assert not (tmp_path / "nowhere").exists()
    one = tensors(tmp_path / "one")
    for out, report in zip(("two", "four"), reports[1:], strict=True):
        found = tensors(tmp_path / out)
        assert found.keys() == one.keys()
        changed = sum(int((~alike(found[key], value)).sum()) for key, value in one.items())
        assert changed < 2e-3 * sum(value.numel() for value in one.values())
        cache = [key for key in one if key.endswith(("k_scale", "v_scale"))]
        assert all(bool(alike(found[key], one[key]).all()) for key in cache)
        assert bool(cache) == ("kv_cache" in rest)
        assert errors(report) == pytest.approx(errors(reports[0]), rel=1e-2)
        assert facts(report) == facts(reports[0])


def test_two_ranks_may_make_one_folder(
    tiny: Callable[..., Path], tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both see that the folder of outlier columns is missing; the second finds it made."""
    made: list[Path] = []
    mkdir = disk.mkdir

    def twice(path: Path) -> None:
        mkdir(path)
        if path.name == outliers.WORKING:
            made.append(path)
            mkdir(path)

    monkeypatch.setattr(disk, "mkdir", twice)
    family, stages, rest = CASES["outliers"]
    asked = recipe(*stages, calibration=text_source(tmp_path, samples=6), **rest)
    run(asked, tiny(family, dtype="fp32"), tmp_path / "out")
    assert [path.parent.name for path in made] == ["out.partial"]


@pytest.mark.parametrize(("method", "scheme"), [("rtn", W4), ("nvfp4", "NVFP4A16")])
def test_data_free_ranks_write_the_same_bytes(
    tiny: Callable[..., Path], tmp_path: Path, runs: Runs, method: str, scheme: Any
) -> None:
    for runs.size, out in ((1, "one"), (3, "three")):
        run(recipe({"method": method, "scheme": scheme}), tiny("llama"), tmp_path / out)
    one, three = (tmp_path / out / "model.safetensors" for out in ("one", "three"))
    assert one.read_bytes() == three.read_bytes()


def test_ranks_share_the_units_of_an_edit(
    tiny: Callable[..., Path], tmp_path: Path, runs: Runs
) -> None:
    asked = recipe({"method": "untie"}, {"method": "cast", "dtype": "fp32"})
    for runs.size, out in ((1, "one"), (2, "two")):
        run(asked, tiny("llama", tie_word_embeddings=True), tmp_path / out)
        first, *others = (journal.units for journal in runs.journals)
        assert all(units == first for units in others)
    one, two = (tmp_path / out / "model.safetensors" for out in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


WIDTH = {"method": "prune_width", "ffn": 40, "heads": 2}
STRUCTURAL: dict[str, Case] = {
    "width": ("llama", [WIDTH], {}),
    "sequences": ("llama", [{**WIDTH, "select": "activation"}], {}),
    "gradients": ("llama", [{**WIDTH, "select": "taylor"}], {}),
    "depth": ("gemma2", [{"method": "prune_depth", "keep": [1]}], {}),
    "hidden": ("llama", [{"method": "prune_hidden", "hidden": 48}], {}),
    "mixture": ("qwen3_moe", [{"method": "prune_width", "experts": 3, "ffn": 24}], {}),
    "pooled": ("llama", [{"method": "gqa", "groups": 1}], {}),
    "normed": ("qwen3", [{"method": "gqa", "groups": 1}], {}),
}
FEW = ["width"]
MORE = [name for name in STRUCTURAL if name not in FEW]


@pytest.mark.usefixtures("answered_here")
@pytest.mark.parametrize("name", FEW + [pytest.param(x, marks=pytest.mark.long) for x in MORE])
def test_ranks_cut_what_one_cuts(
    tiny: Callable[..., Path], tmp_path: Path, runs: Runs, name: str
) -> None:
    """But for the order of sums, which a solve makes larger."""
    family, stages, _ = STRUCTURAL[name]
    asked = recipe(*stages, calibration=text_source(tmp_path, samples=24))
    for runs.size, out in ((1, "one"), (3, "three")):
        options = RunOptions(dtype="fp32")
        run(asked, tiny(family, dtype="fp32"), tmp_path / out, options=options)
        first, *others = (journal.units for journal in runs.journals)
        seen = {name: data for name, data in first.items() if name != LOADS}  # behind the pass
        assert all(units == seen for units in others)
    one, three = tensors(tmp_path / "one"), tensors(tmp_path / "three")
    assert one.keys() == three.keys()
    for key, value in one.items():
        assert (three[key] - value).norm() <= 1e-2 * value.norm(), key


def tensors(folder: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def alike(one: Tensor, other: Tensor) -> Tensor:
    """Codes are the same or not; scales and norms may differ in their last bits."""
    exact = not one.dtype.is_floating_point or one.dtype.itemsize == 1
    return one == other if exact else torch.isclose(one, other, rtol=1e-4, atol=1e-6)


def facts(report: Report) -> list[tuple[object, ...]]:
    return [(x.name, x.tokens, x.passes, x.method, x.outlier_columns) for x in report.layers]


def errors(report: Report) -> list[float]:
    return [layer.error for layer in report.layers if layer.error is not None]


def resumed(asked: Recipe, source: Path, out: Path, *, recorded: list[str]) -> bytes:
    """The weights of a run that was killed when it had recorded these of its blocks."""
    journal = json.loads((out.parent / f"{out.name}.partial" / "journal.json").read_text())
    places, units = (EMBED, "block 0", "block 1"), journal["passes"]["quantize"]["units"]
    assert [unit for unit in units if unit in places] == recorded
    run(asked, source, out, options=RunOptions(resume=True))
    return (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("flushed", [1, *(pytest.param(i, marks=pytest.mark.long) for i in (0, 2))])
def test_a_unit_is_recorded_when_all_have_written_it(
    tiny: Callable[..., Path],
    tmp_path: Path,
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    flushed: int,
) -> None:
    """One rank is killed before its states are on the disk; the resumed run, of as many ranks, has
    the bytes of one that nobody stopped."""
    asked = recipe({**GPTQ, **HEADED}, calibration=text_source(tmp_path, samples=6))
    source, out = tiny("llama"), tmp_path / "out"
    run(asked, source, tmp_path / "whole")
    flush, barrier = HiddenStates.flush, Seat.barrier
    ranks: dict[int, int] = {}  # by thread
    calls: Counter[int] = Counter()

    def named(self: Seat) -> None:
        ranks[threading.get_ident()] = self.rank
        barrier(self)

    def killed(self: HiddenStates) -> None:
        rank = ranks[threading.get_ident()]
        if rank == 1 and calls[rank] == flushed:
            raise faults.Killed
        calls[rank] += 1
        flush(self)

    with monkeypatch.context() as patch:
        patch.setattr(Seat, "barrier", named)
        patch.setattr(HiddenStates, "flush", killed)
        with pytest.raises(faults.Killed):
            run(asked, source, out)
    found = resumed(asked, source, out, recorded=[EMBED, "block 0"][:flushed])
    assert found == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_nobody_goes_on_before_a_unit_is_recorded(
    tiny: Callable[..., Path], tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What leaves block 1 takes the place of what entered block 0. The journal's rank is killed
    while it records block 0, and nothing else holds the others up: block 1 is only passed."""
    only = {"targets": ["model.layers.0.*", "lm_head"]}
    asked = recipe({**GPTQ, **only}, calibration=text_source(tmp_path, samples=6))
    source, out = tiny("llama"), tmp_path / "out"
    run(asked, source, tmp_path / "whole")
    record = PassJournal.record

    def killed(self: PassJournal, unit: str, data: object) -> None:
        if unit == "block 0":
            raise faults.Killed
        record(self, unit, data)

    with monkeypatch.context() as patch:
        patch.setattr(PassJournal, "record", killed)
        with pytest.raises(faults.Killed):
            run(asked, source, out)
    found = resumed(asked, source, out, recorded=[EMBED])
    assert found == (tmp_path / "whole" / "model.safetensors").read_bytes()
