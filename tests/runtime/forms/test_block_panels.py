"""GGUF's blocks in the engine: the file's numbers in its bytes, products as the math says."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compress.errors import CheckpointError, RequestError
from compress.formats import Weights
from compress.formats.gguf_weights import GgufWeights
from compress.quant.blocks import BlockTensor
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.linear import embedding_bytes, facts_of, load_linear, weight_bytes
from compress.runtime.decoder.mlp import Mlp
from compress.runtime.forms import panels
from compress.runtime.forms.block_panels import BlockPanels, BlockPanelsForm
from compress.runtime.forms.block_rows import BlockRows
from compress.runtime.forms.dense import FloatWeight
from compress.runtime.forms.form import Arithmetic
from compress.runtime.loading import room
from compress.runtime.loading.math import settled_math
from compress.serve.open_model import open_model
from compress_kernels.cpu.library import Native, native
from compress_kernels.ops.linear import linear
from compress_kernels.ops.pairs import compiled_pairs
from compress_kernels.panels import Math
from helpers.engine.flat_runs import Runs, load
from helpers.exporters.gguf_files import tiny
from helpers.exporters.gguf_readings import opened, with_small_files

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)
CPU = torch.device("cpu")
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
Made = Callable[..., Weights]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    @cache
    def of(kind: str, family: str = "llama", tied: bool = False) -> Weights:
        folder = tmp_path_factory.mktemp(family)
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
        source = tiny(folder / "model", family, tied=tied, **WIDE, **heads)
        return opened(source, folder, dtype=None, type=kind)

    return of


def fp32(math: Math = "exact") -> Arithmetic:
    return Arithmetic.here(torch.float32, "cpu", math)


@pytest.mark.parametrize("math", ["exact", "int16", "int8"])
@pytest.mark.parametrize("kind", ["Q4_K_M", "Q5_0", "IQ4_XS"])
def test_every_linear_has_the_numbers_of_the_checkpoint(made: Made, kind: str, math: Math) -> None:
    """In the checkpoint's order of rows, which a file of a llama has not."""
    weights, x = made(kind), torch.randn(5, 256)
    for spec in weights.spec.linears():
        weight = load_linear(weights, spec, fp32(math)).weight
        facts, values = facts_of(weights, spec), weights.read(spec.tensor)
        assert isinstance(weight, BlockPanels)
        assert weight.kind == facts.blocks == weights.stored_in(spec.tensor)
        assert weight.nbytes == BlockPanelsForm().nbytes(facts, fp32(math))
        found, wanted = weight.matmul(x, None, None), linear(x, values, None)
        assert torch.equal(found, wanted) == (math == "exact")
        assert (found - wanted).norm() < 2e-2 * wanted.norm()


def test_weights_of_one_type_are_joined(made: Made) -> None:
    weights = made("Q4_K_M")
    q, k, v = (
        load_linear(weights, x, fp32()).weight
        for x in weights.spec.linears()
        if x.role in ("q", "k", "v")
    )
    assert isinstance(q, BlockPanels)
    both, x = q.joined((k,)), torch.randn(3, 256)
    assert both is not None
    apart = torch.cat([part.matmul(x, None, None) for part in (q, k)], 1)
    assert torch.equal(both.matmul(x, None, None), apart)
    assert isinstance(v, BlockPanels)
    assert (v.kind, q.kind) == ("Q6_K", "Q4_K")
    assert q.joined((v,)) is None
    (layer,) = Decoder.load(weights).layers
    assert isinstance(layer.mlp, Mlp)
    assert len(layer.mlp.inner.linears) == 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mixtral"])
def test_exact_is_the_model_of_the_decoded_numbers(made: Made, family: str, tmp_path: Path) -> None:
    """Weights that lie the other way round, and experts, too."""
    sizes = {"n_embd": 256, "n_inner": 256, "n_layer": 1} if family == "gpt2" else WIDE
    weights = opened(tiny(tmp_path / "model", family, **sizes), tmp_path, dtype=None, type="Q4_K_S")
    plain = tmp_path / "model"
    values = {name: weights.read(name).float().contiguous() for name in weights.shapes}
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    ids = list(range(20))
    found, wanted = (
        Runs(load(folder), texts=1, most=len(ids)).whole(ids)
        for folder in (weights.checkpoint.path, plain)
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_stays_in_blocks(
    made: Made, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that is tied to it lies in panels beside."""
    weights = made("Q4_K_M", tied=tied)
    decoder, ids = Decoder.load(weights, math="int16"), torch.tensor([3, 0, 90])
    assert isinstance(decoder.embedding, BlockRows)
    assert isinstance(decoder.head.weight, BlockPanels)
    wanted = weights.read(weights.spec.embedding)[ids]
    assert torch.equal(decoder.embedding.rows(ids), wanted)
    head = decoder.head.weight.nbytes if tied else 0
    assert embedding_bytes(weights, fp32("int16")) == decoder.embedding.nbytes + head
    needed = weight_bytes(weights, fp32("int16")) + 2 * embedding_bytes(weights, fp32("int16"))
    monkeypatch.setattr(room, "available_bytes", lambda: needed - 1)
    with pytest.raises(RequestError, match="of memory as"):
        open_model(weights.checkpoint.path)
    monkeypatch.setattr(room, "available_bytes", lambda: needed)
    assert open_model(weights.checkpoint.path).math == "int16"


def test_math_is_settled_before_weights_are_read(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = made("Q4_K_M")
    monkeypatch.setattr(type(weights), "blocks", None)
    monkeypatch.setattr(type(weights), "read", None)
    assert settled_math(weights, None, torch.float32, "cpu") == "int16"
    assert settled_math(weights, "int8", torch.float32, "cpu") == "int8"
    assert settled_math(weights, None, torch.float16, "cpu") == "exact"
    with pytest.raises(RequestError, match="has no products for it: they are for dtype fp32;"):
        settled_math(weights, "int8", torch.float16, "cpu")


def test_who_reads_no_panels_decodes_once(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "native", lambda: Native(None, "no compiler"))
    weights, half = made("Q4_K_M"), Arithmetic(torch.float16, CPU)
    assert BlockPanelsForm().why_not(facts_of(weights, next(iter(weights.spec.linears()))), half)
    decoder = Decoder.load(weights, dtype=torch.float16)
    assert not isinstance(decoder.embedding, BlockRows)
    for spec in weights.spec.linears():
        kept = load_linear(weights, spec, half).weight
        assert isinstance(kept, FloatWeight)
        assert torch.equal(kept.values, weights.read(spec.tensor).half())


@pytest.mark.skipif(not compiled_pairs(CPU), reason="torch multiplies")
def test_products_in_bf16_have_the_numbers_rounded_once(made: Made) -> None:
    weights, x = made("Q4_K_M"), torch.randn(5, 256).bfloat16()
    how = Arithmetic.here(torch.bfloat16, "cpu")
    for spec in weights.spec.linears():
        weight = load_linear(weights, spec, how).weight
        assert isinstance(weight, BlockPanels)
        wanted = linear(x, weights.read(spec.tensor).bfloat16(), None)
        assert torch.equal(weight.matmul(x, None, None), wanted)


def test_what_is_not_finite_is_named(made: Made, tmp_path: Path) -> None:
    weights = made("Q4_0")
    tensor = "model.layers.0.mlp.down_proj.weight"
    assert isinstance(weights, GgufWeights)
    held = weights.held[tensor].info
    folder = with_small_files(weights.checkpoint.path, tmp_path)
    raw = bytearray((folder / "model.gguf").read_bytes())
    raw[held.start + 18 * 9 : held.start + 18 * 9 + 2] = b"\x00\x7c"  # infinity
    (folder / "model.gguf").write_bytes(raw)
    with pytest.raises(
        CheckpointError, match=r"'blk.0.ffn_down.weight' .* infinite values, the first"
    ):
        load(folder)
    whole = torch.tensor(raw[held.start : held.start + held.nbytes], dtype=torch.uint8)
    assert not BlockTensor("Q4_0", whole.view(256, -1)).is_finite
