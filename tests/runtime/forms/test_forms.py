"""Which form a weight takes, and that a new row is all it takes to have another one."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from platform import machine

import pytest
import torch
from torch import Tensor

from compress.arch.spec import LinearSpec
from compress.checkpoint import Checkpoint
from compress.errors import RequestError
from compress.formats import open_weights
from compress.quant.scheme import PRESETS, QuantScheme
from compress.quant.tensor import InputQuantization, QuantizedTensor
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.linear import Linear, load_linear, weight_bytes
from compress.runtime.forms import table
from compress.runtime.forms.dense import DenseForm
from compress.runtime.forms.form import Arithmetic, LinearFacts, LinearForm, LinearWeight
from compress.runtime.forms.packed import DecodedTiles
from compress.runtime.forms.table import choose
from compress.runtime.loading import room
from compress.runtime.loading.model import Model
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import RequestResult, Sampling
from compress.serve.open_model import CacheOptions
from compress.verbs import open_model
from compress_kernels.cpu.library import instruction_sets
from compress_kernels.ops.linear import linear
from helpers import compressed_models, tiny_models

G32, W8A8 = QuantScheme(bits=4, group_size=32), PRESETS["W8A8"]
FP32 = Arithmetic(torch.float32, torch.device("cpu"))


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Codes a byte each, column by column, and what else a tensor has."""

    codes: Tensor
    rest: QuantizedTensor
    plain: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[1], self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.rest.scale.nbytes

    def matmul(self, x: Tensor, inputs: InputQuantization | None, bias: Tensor | None) -> Tensor:
        assert inputs is None
        rest = self.rest
        whole = QuantizedTensor(self.codes.t(), rest.scale, None, rest.g_idx, rest.scheme)
        return linear(x, whole.dequantize(self.plain).to(x.dtype), bias)

    def joined(self, others: tuple[LinearWeight, ...]) -> "Columns | None":
        return None


@dataclass(frozen=True, slots=True)
class ByColumns:
    """Another way to keep codes, for some schemes and some machines."""

    name: str = "codes by columns"
    joins: bool = False

    def why_not(self, facts: LinearFacts, how: Arithmetic) -> str | None:
        if facts.scheme != G32:
            return "only int4 in groups of 32 is laid out so"
        return None if facts.shape[0] <= 64 else f"{facts.shape[0]} rows are more than 64"

    def nbytes(self, facts: LinearFacts, how: Arithmetic) -> int:
        return prod(facts.shape) + prod(G32.scale_shape(*facts.shape)) * facts.stored.itemsize

    def pack(self, weight: QuantizedTensor, facts: LinearFacts, how: Arithmetic) -> Columns:
        return Columns(weight.codes.t().contiguous(), weight, facts.plain)


@dataclass(frozen=True, slots=True, eq=False)
class Widened:
    """A dense weight as it is stored, widened for a product."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def matmul(self, x: Tensor, inputs: InputQuantization | None, bias: Tensor | None) -> Tensor:
        return linear(x, self.values.to(x.dtype), bias)

    def joined(self, others: tuple[LinearWeight, ...]) -> "Widened | None":
        values = [other.values for other in others if isinstance(other, Widened)]
        return None if len(values) < len(others) else Widened(torch.cat((self.values, *values)))


@dataclass(frozen=True, slots=True)
class AsStored:
    """16-bit weights that are not widened when they are read."""

    name: str = "weights as stored"
    joins: bool = True

    def why_not(self, facts: LinearFacts, how: Arithmetic) -> str | None:
        return "it is fp32 already" if facts.stored == torch.float32 else None

    def nbytes(self, facts: LinearFacts, how: Arithmetic) -> int:
        return prod(facts.shape) * facts.stored.itemsize

    def pack(self, weight: Tensor, facts: LinearFacts, how: Arithmetic) -> Widened:
        return Widened(weight.to(how.device).contiguous())


@dataclass(frozen=True, slots=True)
class Rounding:
    """Takes what an engine of another math, on another processor, would take."""

    name: str = "rounded products"
    joins: bool = False

    def why_not(self, facts: LinearFacts, how: Arithmetic) -> str | None:
        if how.math != "int16":
            return f"math is {how.math}"
        return None if "avx512_vnni" in how.isa else "the processor has no AVX512_VNNI"

    def nbytes(self, facts: LinearFacts, how: Arithmetic) -> int:
        raise NotImplementedError  # a row that refuses is asked for no more than its reason

    def pack(self, weight: QuantizedTensor, facts: LinearFacts, how: Arithmetic) -> LinearWeight:
        raise NotImplementedError  # a row that refuses is asked for no more than its reason


def test_a_row_chooses_by_math_and_instruction_set() -> None:
    rows: tuple[LinearForm[QuantizedTensor], ...] = (Rounding(), ByColumns(), DecodedTiles())
    facts = LinearFacts((128, 64), G32, torch.bfloat16, torch.bfloat16)
    cpu = torch.device("cpu")
    vnni = frozenset({"avx2", "avx512f", "avx512_vnni"})
    assert choose(rows, facts, Arithmetic(torch.float32, cpu, vnni, "int16")).form is rows[0]
    found = choose(rows, facts, Arithmetic(torch.float32, cpu, frozenset({"avx2"}), "int16"))
    assert found.form is rows[2]
    assert found.refused == (
        ("rounded products", "the processor has no AVX512_VNNI"),
        ("codes by columns", "128 rows are more than 64"),
    )
    exact = choose(rows, facts, Arithmetic(torch.float32, cpu, vnni))
    assert exact.refused[0] == ("rounded products", "math is exact")


def test_instruction_sets_are_those_of_the_processor() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    assert instruction_sets() <= set(flags)
    assert Arithmetic.here(torch.float32, "cpu").isa == instruction_sets()
    assert Arithmetic.here(torch.float32, "cuda").isa == frozenset()
    if instruction_sets() and machine() == "x86_64":
        assert ("avx2" in instruction_sets()) == ("avx2" in flags)


def mixed(spec: LinearSpec) -> QuantScheme:
    """The inputs of the last linear of a block are rounded."""
    return W8A8 if spec.role == "down" else G32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    compressed_models.write(tiny_models.make("llama", folder / "source"), folder / "out", mixed)
    return folder / "out"


@pytest.fixture
def rows_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CODED", (ByColumns(), *table.CODED))
    monkeypatch.setattr(table, "DENSE", (AsStored(), *table.DENSE))


def answers(model: Model) -> list[tuple[tuple[int, ...], float | None]]:
    def of(results: list[RequestResult]) -> list[tuple[tuple[int, ...], float | None]]:
        return [(result.tokens, result.score) for result in results]

    sampling = Sampling(max_tokens=8, temperature=1.0, seed=3, n=2)
    generated = of(model.generate(["once upon", "the old cat"], sampling))
    return generated + of(model.score("once upon", [" a time", " the cat"]))


def linears_of(decoder: Decoder) -> Iterator[Linear]:
    for layer in decoder.layers:
        yield from (*layer.attention.qkv.linears, layer.attention.out)
        assert not hasattr(layer.mlp, "experts")
        yield from (*layer.mlp.inner.linears, layer.mlp.down)
    yield decoder.head


def opened(folder: Path) -> Model:
    cache = CacheOptions(tokens=64)
    return open_model(folder, math="exact", limits=Limits(sequences=2), cache=cache)


def test_a_new_row_is_chosen_and_its_numbers_are_the_same(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    before = opened(folder)
    assert before.notices == ("the cache has room for 64 tokens; the model reads 128",)
    want = answers(before)
    request.getfixturevalue("rows_first")
    model = opened(folder)
    decoder = Decoder.load(open_weights(Checkpoint.open(folder)))
    kinds = {type(linear.weight) for linear in linears_of(decoder)}
    assert {Columns, Widened} < kinds
    assert answers(model) == want


@pytest.mark.usefixtures("rows_first")
def test_rows_that_refuse_are_named(folder: Path) -> None:
    """Two layers of seven linears, an intermediate size of 96."""
    columns = "not codes by columns"
    first, second = opened(folder).notices[:2]
    assert first == (
        f"4 linears (int4 sym g32): codes in panels; {columns} (96 rows are more than 64)"
    )
    assert second == (
        f"2 linears (int8 sym channel a8): codes in panels; {columns} (only int4 in groups of 32"
        " is laid out so)"
    )


@pytest.mark.parametrize("new", [False, True], ids=["as they are", "with rows before them"])
def test_bytes_are_told_before_anything_is_read(
    folder: Path, new: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if new:
        request.getfixturevalue("rows_first")
    weights = open_weights(Checkpoint.open(folder))
    decoder = Decoder.load(weights)
    held = sum(linear.weight.nbytes for linear in linears_of(decoder))
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "read", None)
        assert weight_bytes(weights, FP32) == held
    needed = held + 2 * decoder.embedding.nbytes
    monkeypatch.setattr(room, "available_bytes", lambda: needed - 1)
    with pytest.raises(RequestError, match="of memory as"):
        open_model(folder, math="exact")
    monkeypatch.setattr(room, "available_bytes", lambda: needed)
    assert open_model(folder, math="exact").encode("once")


@pytest.mark.parametrize("family", tiny_models.TABLED)
def test_a_linear_holds_what_its_facts_say(family: str, tmp_path: Path) -> None:
    """Dense weights of all families, some of them stored the other way round."""
    weights = open_weights(Checkpoint.open(tiny_models.make(family, tmp_path, dtype="bf16")))
    half = Arithmetic(torch.float16, torch.device("cpu"))
    for spec in weights.spec.linears():
        weight = load_linear(weights, spec, half).weight
        facts = LinearFacts(spec.shape, None, torch.bfloat16, torch.bfloat16)
        assert (weight.shape, weight.nbytes) == (spec.shape, DenseForm().nbytes(facts, half))
