"""Dense weights in an engine: kept as they are stored where its products read that, with the bits
of fp32 copies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.formats import open_weights
from compress.quant.scheme import QuantScheme
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.latent import LatentAttention
from compress.runtime.decoder.linear import embedding_bytes, weight_bytes
from compress.runtime.forms import dense
from compress.runtime.forms.dense import FloatWeight
from compress.runtime.forms.form import Arithmetic
from compress.runtime.forms.pairs import PairWeight
from compress.speed.products import workload_of
from compress_kernels.cpu.library import native
from compress_kernels.heads import HeadPanels, lay_out_heads
from compress_kernels.ops.pairs import compiled_pairs
from compress_kernels.pairs import PairPanels
from helpers import compressed_models, tiny_models
from helpers.engine.flat_runs import Runs

needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)

FP32 = Arithmetic(torch.float32, torch.device("cpu"))
# Tied heads, weights that are stored the other way round, ones that are cut by heads, experts.
FAMILIES = ("llama", "gemma2", "gpt2", "deepseek_v3", "qwen3_moe")


def held(value: Any, found: dict[int, Tensor]) -> dict[int, Tensor]:
    """All weights of products in what a decoder is made of, each once."""
    if isinstance(value, FloatWeight | PairPanels | HeadPanels):
        found[id(value.values)] = value.values
    elif isinstance(value, tuple):
        for part in value:
            held(part, found)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            held(getattr(value, name), found)
    return found


def logits(decoder: Decoder, ids: list[int]) -> Tensor:
    return Runs(decoder, texts=1, most=64).whole(ids)


def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "reads", lambda stored, dtype, device: stored == dtype)


@needs_native
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_widened_weights(
    family: str, dtype: tiny_models.Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied = family == "llama"
    folder = tiny_models.make(family, tmp_path, dtype=dtype, tied=tied)
    weights, ids = open_weights(Checkpoint.open(folder)), [3, 17, 5, 99, 3, 41, 7]
    decoder = Decoder.load(weights)
    kept = held(decoder, {}).values()
    assert {x.dtype for x in kept} == {decoder.embedding.values.dtype} == {weights.plain_dtype}
    found = logits(decoder, ids)
    widened(monkeypatch)
    wide = Decoder.load(weights)
    assert wide.embedding.values.dtype == torch.float32
    assert sum(x.nbytes for x in held(wide, {}).values()) == 2 * sum(x.nbytes for x in kept)
    assert torch.equal(found, logits(wide, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_that_are_told_are_kept(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = open_weights(Checkpoint.open(tiny_models.make(family, tmp_path)))
    kept, how = held(Decoder.load(weights, dtype=dtype), {}), Arithmetic.here(dtype, "cpu")
    told = weight_bytes(weights, how) + embedding_bytes(weights, how)
    assert sum(x.nbytes for x in kept.values()) == told
    assert workload_of(weights, dtype=dtype).weight_bytes == told


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_in_bf16_gives_the_rows_of_the_file(tied: bool, tmp_path: Path) -> None:
    """From the panels that a tied head has, too."""
    folder = tiny_models.make("llama", tmp_path, dtype="bf16", tied=tied)
    weights = open_weights(Checkpoint.open(folder))
    embedding = Decoder.load(weights, dtype=torch.bfloat16).embedding
    ids = torch.tensor([3, 0, tiny_models.VOCAB - 1, 3])
    assert torch.equal(embedding.rows(ids), weights.read(weights.spec.embedding)[ids])
    packed = isinstance(embedding, PairWeight)
    assert packed == (tied and compiled_pairs(torch.device("cpu")))


@needs_native
def test_parts_of_different_dtypes_stay_apart(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    wide = [name for name in tensors if "k_proj" in name]
    save_file(tensors | {name: tensors[name].float() for name in wide}, path, {"format": "pt"})
    weights = open_weights(Checkpoint.open(folder))
    decoder = Decoder.load(weights)
    for layer in decoder.layers:
        assert not hasattr(layer.attention, "unfolding")
        assert len(layer.attention.qkv.linears) == 3
    told = workload_of(weights, dtype=torch.float32).weight_bytes
    assert sum(x.nbytes for x in held(decoder, {}).values()) == told
    same = Decoder.load(open_weights(Checkpoint.open(tiny_models.make("llama", tmp_path / "as"))))
    assert torch.equal(logits(decoder, [1, 2, 3]), logits(same, [1, 2, 3]))
    assert len(Decoder.load(weights, dtype=torch.bfloat16).layers[0].attention.qkv.linears) == 1


def test_an_embedding_of_codes_is_decoded(tmp_path: Path) -> None:
    source = tiny_models.make("llama", tmp_path / "source")
    scheme = QuantScheme(bits=4, group_size=32)
    compressed_models.write(source, tmp_path / "out", scheme, embedding=scheme)
    weights = open_weights(Checkpoint.open(tmp_path / "out"))
    found = Decoder.load(weights).embedding
    assert found.values.dtype == dense.kept_in(torch.bfloat16, FP32)
    assert torch.equal(found.values.float(), weights.read(weights.spec.embedding).float())
    assert found.nbytes == embedding_bytes(weights, FP32)


def test_codes_that_heads_cut_are_decoded_to_the_plain_dtype(tmp_path: Path) -> None:
    source = tiny_models.make("deepseek_v3", tmp_path / "source")
    compressed_models.write(source, tmp_path / "out", QuantScheme(bits=4, group_size=16))
    weights = open_weights(Checkpoint.open(tmp_path / "out"))
    decoder = Decoder.load(weights)
    spec = next(x for x in weights.spec.blocks[0].linears if x.role == "kv_b")
    assert weights.is_quantized(spec.name)
    attention = decoder.layers[0].attention
    assert isinstance(attention, LatentAttention)
    cut, how = attention.unfolding, attention.how
    whole = weights.read(spec.tensor).view(how.heads, how.nope + how.value_width, how.rank)
    parts = (cut.keys, whole[:, : how.nope].transpose(1, 2)), (cut.values, whole[:, how.nope :])
    for part, numbers in parts:
        assert isinstance(part.weights, HeadPanels)
        assert part.weights.values.dtype == dense.kept_in(torch.bfloat16, FP32)
        assert torch.equal(part.weights.values.float(), lay_out_heads(numbers).values.float())
