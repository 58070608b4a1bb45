"""A fold leaves the function as it is, reaches every tensor it concerns, and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.arch.describe import describe
from compress.arch.spec import BlockSpec, DecoderSpec, FoldPair, LinearSpec
from compress.checkpoint import Checkpoint
from compress.methods.folding import Fold, Folds, by_channel, expand, storable
from compress.quant.scheme import QuantScheme
from compress_calibration.hessian import InputStats
from helpers import tiny_models

FAMILIES = (*tiny_models.TABLED, "deepseek_v3")


def random_scale(channels: int, generator: torch.Generator, spread: float = 2.0) -> Tensor:
    return torch.exp2(torch.randn(channels, generator=generator) * spread)


def logits_of(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(40).reshape(2, 20) * 5 % tiny_models.VOCAB
    with torch.inference_mode():
        return model(ids).logits.double()


def fold_checkpoint(
    spec: DecoderSpec, folder: Path, scale_of: Callable[[FoldPair, Tensor], Tensor]
) -> None:
    """Rewrite a one-file checkpoint with all its pairs folded."""
    tensors = load_file(folder / "model.safetensors")
    for block in spec.blocks:
        folds = Folds.of(block)
        for pair in block.folds:
            scale = scale_of(pair, tensors[pair.tensors[0]])
            folds.add(Fold(pair, scale))
        linears = {x.tensor: x for x in block.linears}
        for name in {tensor for tensor, _ in block.modules}:
            tensors[name] = folded(folds, name, tensors[name], linears.get(name))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def folded(folds: Folds, name: str, tensor: Tensor, linear: LinearSpec | None) -> Tensor:
    if linear is None:
        return folds.vector(name, tensor)
    logical = tensor.t() if linear.transposed else tensor
    weight = folds.weight(name, logical)
    return (weight.t() if linear.transposed else weight).to(tensor.dtype).contiguous()


@pytest.mark.parametrize(
    ("family", "bias"),
    [(name, None) for name in FAMILIES]
    + [(name, True) for name in FAMILIES if name in tiny_models.BIAS_FAMILIES],
)
def test_folding_every_pair_leaves_the_function_as_it_is(
    family: str, bias: bool | None, tmp_path: Path
) -> None:
    tiny_models.make(family, tmp_path, dtype="fp32", bias=bias)
    checkpoint = Checkpoint.open(tmp_path)
    spec = describe(checkpoint.config, checkpoint.shapes)
    before = logits_of(tmp_path)
    generator = torch.Generator().manual_seed(1)
    seen = []

    def scale_of(pair: FoldPair, weight: Tensor) -> Tensor:
        seen.append(pair.writer)
        channels = torch.arange(pair.rows[1])[pair.channels()]
        return random_scale(len(channels), generator)

    fold_checkpoint(spec, tmp_path, scale_of)
    assert len(seen) == sum(len(block.folds) for block in spec.blocks) > 0
    error = (logits_of(tmp_path) - before).abs().max() / before.abs().max()
    assert error < 1e-4


def test_a_fold_that_misses_a_reader_changes_the_function(tmp_path: Path) -> None:
    """The identity above would not hold by accident."""
    tiny_models.make("llama", tmp_path, dtype="fp32")
    before = logits_of(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"][0] /= 4
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (logits_of(tmp_path) - before).abs().max() / before.abs().max() > 1e-3


def attention_pair(kv_heads: int, repeat: int, head_dim: int) -> FoldPair:
    channels = kv_heads * head_dim
    return FoldPair("v", "linear", ("v.weight",), (0, channels), ("o",), "in", repeat, head_dim)


def test_expand_repeats_the_channels_of_a_kv_head_for_its_query_heads() -> None:
    pair = attention_pair(kv_heads=2, repeat=3, head_dim=2)
    columns = expand(pair, torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert columns.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    assert by_channel(pair, columns).tolist() == [[0, 1, 2, 3]] * 3
    values = torch.randn(12)
    rows = by_channel(pair, values)  # rows: [repeat, channels]
    for k in range(12):
        head, within = k // 6, k % 2
        assert rows[k // 2 % 3, head * 2 + within] == values[k]
    assert expand(attention_pair(4, 1, 2), values[:8]) is not None
    assert torch.equal(by_channel(attention_pair(4, 1, 2), values[:8])[0], values[:8])


def test_the_output_of_grouped_attention_is_kept() -> None:
    """o W_v x, with the heads of v repeated as attention repeats them."""
    pair = attention_pair(kv_heads=2, repeat=2, head_dim=4)
    v, o = torch.randn(8, 16), torch.randn(16, 16)
    folds = folds_of((8, 16), (16, 16))
    folds.add(Fold(pair, random_scale(8, torch.Generator().manual_seed(0))))
    new_v, new_o = folds.weight("v.weight", v), folds.weight("o.weight", o)

    def heads(w: Tensor) -> Tensor:
        return w.reshape(2, 1, 4, 16).expand(-1, 2, -1, -1).reshape(16, 16)

    torch.testing.assert_close(new_o @ heads(new_v), o @ heads(v), rtol=1e-4, atol=1e-4)
    assert folds.touches("v.weight")
    assert not folds.touches("q.weight")
    assert torch.equal(folds.weight("q.weight", v), v)


def folds_of(v: tuple[int, int], o: tuple[int, int]) -> Folds:
    linears = tuple(
        LinearSpec(name, f"{name}.weight", shape, name, key, name)
        for name, shape, key in (("v", v, "x"), ("o", o, "in"))
    )
    return Folds.of(BlockSpec(0, "", linears, ()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_settled_fold_is_exact_in_the_norm_that_is_stored(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    norm = (torch.randn(512, generator=generator) * 2).to(dtype)
    norm[:3] = 0
    pair = FoldPair("norm", "norm", ("norm.weight",), (0, 512), ("v",), "x")
    fold = storable(Fold(pair, random_scale(512, generator, spread=4.0)), norm)
    folds = folds_of((8, 512), (8, 8))
    folds.add(fold)
    stored = folds.vector("norm.weight", norm)
    assert stored.dtype == dtype
    assert fold.scale[:3].tolist() == [1, 1, 1]
    # What the readers' columns are multiplied by is what the stored norm has lost.
    product = stored.double() * folds.columns["v.weight"].double()
    assert ((product - norm.double()).abs() <= norm.double().abs() * 2**-23).all()
    if dtype != torch.float32:
        torch.testing.assert_close(norm.float() / fold.scale, stored.float(), rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_a_norm_adds_to_its_weight_is_divided_with_it(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    norm = torch.randn(512, generator=generator).to(dtype)
    norm[:3] = -1  # multiplies by 0
    pair = FoldPair("norm", "norm", ("norm.weight",), (0, 512), ("v",), "x", offset=1.0)
    folds = folds_of((8, 512), (8, 8))
    for _ in range(2):
        stored = folds.vector("norm.weight", norm)
        folds.add(storable(Fold(pair, random_scale(512, generator)), stored))
    stored = folds.vector("norm.weight", norm)
    assert stored.dtype == dtype
    assert folds.columns["v.weight"][:3].tolist() == [1, 1, 1]
    product = (stored.double() + 1) * folds.columns["v.weight"].double()
    # fp32 holds the sum with 1 to 2^-24, which the scale then multiplies.
    bound = (norm.double() + 1).abs() * 2**-22 + folds.columns["v.weight"].double() * 2**-22
    assert ((product - (norm.double() + 1)).abs() <= bound).all()


def test_settle_keeps_channels_that_cannot_be_divided() -> None:
    pair = FoldPair("norm", "norm", ("norm.weight",), (0, 4), ("v",), "x")
    norm = torch.tensor([1.0, 1e-7, 60000.0, 2.0], dtype=torch.float16)
    scale = torch.tensor([2.0, 1e6, 1e-6, 1e30])
    assert storable(Fold(pair, scale), norm).scale.tolist() == [2.0, 1.0, 1.0, 1.0]


def test_statistics_and_weights_are_seen_behind_all_folds() -> None:
    generator = torch.Generator().manual_seed(5)
    pair = FoldPair("norm", "norm", ("norm.weight", "norm.bias"), (0, 16), ("v",), "x")
    folds = folds_of((8, 16), (16, 8))
    x = torch.randn(100, 16, generator=generator)
    stats = InputStats(x.T @ x / 100, 100, x.abs().amax(0), x.abs().mean(0))
    assert folds.stats("v.weight", stats) is stats
    first, second = (random_scale(16, generator) for _ in range(2))
    folds.add(Fold(pair, first))
    folds.add(Fold(pair, second))
    scaled = x / (first * second)
    seen = folds.stats("v.weight", stats)
    assert seen.absmax is not None
    assert seen.absmean is not None
    torch.testing.assert_close(seen.hessian, scaled.T @ scaled / 100)
    torch.testing.assert_close(seen.absmax, scaled.abs().amax(0))
    torch.testing.assert_close(seen.absmean, scaled.abs().mean(0))
    bias = torch.ones(16, dtype=torch.bfloat16)
    assert folds.vector("norm.bias", bias).dtype == torch.bfloat16
    weights, schemes = {"v": torch.ones(8, 16).bfloat16()}, {"v": QuantScheme()}
    (reader,) = folds.view(pair, weights, schemes, stats, {"v": "positive"}).readers
    assert reader.signs == "positive"
    torch.testing.assert_close(reader.folded(), (first * second).expand(8, 16))
    assert reader.folded(step=3).shape == (3, 16)
    assert folds.view(pair, {}, {}, stats, {}).readers == ()


def test_config_says_which_pairs_a_real_checkpoint_has(demo_model: Path) -> None:
    checkpoint = Checkpoint.open(demo_model)
    spec = describe(json.loads((demo_model / "config.json").read_text()), checkpoint.shapes)
    assert all(len(block.folds) == 4 for block in spec.blocks)
