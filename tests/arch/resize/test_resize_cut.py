"""A cut model computes what the source computes with zeros in place of what goes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.arch.resize.cut import Kept, cut, cut_name
from compress.arch.resize.shape import Shape
from helpers.resizing.resized_models import (
    LAYER_NORM,
    LAYERS,
    Source,
    State,
    clone,
    cut_model,
    load,
    logits,
    logits_of,
    without_heads,
    write,
    writers,
    zero_inputs,
)
from helpers.tiny_models import MIXTURES, TABLED

GROUPED = tuple(family for family in TABLED if family not in LAYER_NORM)
NORMS = ("norm", "ln_1", "ln_2", "ln_f")
EMBEDDINGS = ("embed_tokens", "embed_positions", "embed_in", "wte", "wpe")
FFN = (24, 72)  # of experts, of plain MLPs


def chosen(count: int, of: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(of, generator=generator)[:count].sort().values


@pytest.fixture
def same(tmp_path: Path) -> Callable[..., None]:
    """Loads a cut model and the source with other tensors; both must give the same logits."""

    def check(source: Source, result: tuple[dict[str, Any], State], zeroed: State) -> None:
        write(tmp_path / "cut", *result)
        found = logits(load(tmp_path / "cut"))
        wanted = logits_of(source, zeroed, tmp_path / "zeroed")
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        assert found.std() > 0.01
        assert not torch.allclose(found, logits(source.model), atol=1e-3)

    return check


@pytest.mark.parametrize("family", TABLED)
def test_channels_of_the_mlp(family: str, sources: Any, same: Any) -> None:
    source = sources(family)
    narrow = family == "qwen3_moe"
    count = FFN[not narrow]
    total = 32 if narrow else 96
    experts = 4 if family in MIXTURES else 1
    stays = {
        (index, expert): chosen(count, total, 10 * index + expert)
        for index in range(LAYERS)
        for expert in range(experts)
    }
    zeroed = clone(source)
    for block in source.spec.blocks:
        for linear in block.linears:
            if linear.role == "down":
                zero_inputs(zeroed, linear, stays[block.index, linear.expert or 0])
    kept = {i: Kept(ffn=tuple(stays[i, e] for e in range(experts))) for i in range(LAYERS)}
    same(source, cut_model(source, Shape(ffn=count), kept.__getitem__), zeroed)


@pytest.mark.parametrize("family", GROUPED)
def test_query_heads_within_their_groups(family: str, sources: Any, same: Any) -> None:
    source = sources(family)
    kept = {i: Kept(heads=torch.tensor([i % 2, 3 - i // 2])) for i in range(LAYERS)}
    result = cut_model(source, Shape(heads=2), kept.__getitem__)
    same(source, result, without_heads(source, kept))


@pytest.mark.parametrize("family", GROUPED)
def test_heads_of_keys_and_values_take_their_queries_along(
    family: str, sources: Any, same: Any
) -> None:
    source = sources(family)
    kept = {i: Kept(kv_heads=torch.tensor([i % 2])) for i in range(LAYERS)}
    result = cut_model(source, Shape(kv_heads=1), kept.__getitem__)
    same(source, result, without_heads(source, kept))


@pytest.mark.parametrize("family", TABLED)
def test_blocks(family: str, sources: Any, same: Any) -> None:
    """The source with a block that adds nothing to the residual."""
    source = sources(family)
    zeroed = clone(source)
    for linear in writers(source.spec, [0 if family == "smollm3" else 1]):
        zeroed[linear.tensor].zero_()
        zeroed.get(f"{linear.name}.bias", torch.zeros(1)).zero_()
    layers = (1, 2) if family == "smollm3" else (0, 2)
    result = cut_model(source, Shape(layers=layers), lambda index: Kept())
    same(source, result, zeroed)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts(family: str, sources: Any, tmp_path: Path) -> None:
    """The source with routers that send nothing to the experts that go."""
    source = sources(family)
    kept = {i: Kept(experts=chosen(3, 4, i)) for i in range(LAYERS)}

    routers = {f"model.layers.{i}.mlp.gate": kept[i].experts for i in range(LAYERS)}
    hooks = [
        source.model.get_submodule(name).register_forward_hook(partial(renumber, stays))
        for name, stays in routers.items()
    ]
    rows = {f"{name}.weight": stays for name, stays in routers.items()}
    state = {name: source.model.get_parameter(name)[stays] for name, stays in rows.items()}
    wanted = logits(source.model, state)
    for hook in hooks:
        hook.remove()
    write(tmp_path / "cut", *cut_model(source, Shape(experts=3), kept.__getitem__))
    found = logits(load(tmp_path / "cut"))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, logits(source.model), atol=1e-3)


def renumber(stays: Tensor, router: Any, inputs: Any, out: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Choices among the experts that stay, by their numbers among all."""
    return *out[:2], stays[out[2]]


@pytest.mark.parametrize("family", TABLED)
def test_channels_of_the_residual(family: str, sources: Any, same: Any) -> None:
    """A norm divides by the mean of fewer squares: the source's gains are scaled to make up for it.

    LayerNorm takes the mean out as well, so what is written has none here. Where heads must fill
    hidden, one of them goes along.
    """
    source, layered = sources(family), family in LAYER_NORM
    hidden, heads = chosen(48, 64, 1), torch.tensor([0, 2, 3]) if layered else None
    kept = Kept(heads=heads, hidden=hidden)
    goes = torch.ones(64, dtype=torch.bool)
    goes[hidden] = False
    given = clone(source)
    for value in residual_writes(source, given):
        if layered:
            value[..., hidden] -= value[..., hidden].mean(-1, keepdim=True)
        if family == "opt":  # its norms have an epsilon of 1e-5, which nothing sets
            value *= 30
    source = replace(source, state=given)
    every = dict.fromkeys(range(LAYERS), kept)
    zeroed = without_heads(source, every) if layered else clone(source)
    for value in residual_writes(source, zeroed):
        value[..., goes] = 0
    offset = 1.0 if family.startswith("gemma") else 0.0
    for gains, bias in residual_norms(zeroed):
        gains.copy_((gains + offset) * 0.75**0.5 - offset)
        bias[goes] = 0
    if offset:
        zeroed[source.spec.embedding] *= 0.75**0.5  # the class scales it by the root of hidden
    shape = Shape(hidden=48, heads=3 if layered else None)
    same(source, cut_model(source, shape, every.__getitem__), zeroed)


def residual_writes(source: Source, state: State) -> Iterator[Tensor]:
    """All that is added up in the residual, as [..., channels]: embeddings, linears, biases."""
    yield from (x for name, x in state.items() if name.split(".")[-2] in EMBEDDINGS)
    for linear in writers(source.spec, range(LAYERS)):
        weight = state[linear.tensor]
        yield weight if linear.transposed else weight.T
        if f"{linear.name}.bias" in state:
            yield state[f"{linear.name}.bias"]


def residual_norms(state: State) -> Iterator[tuple[Tensor, Tensor]]:
    """Gains and biases of all norms over the residual, or over what is added to it."""
    for name, gains in state.items():
        norm = name.removesuffix(".weight")
        if norm.endswith(NORMS) and not norm.endswith(("q_norm", "k_norm")) and norm != name:
            yield gains, state.get(f"{norm}.bias", torch.zeros_like(gains))


def test_heads_of_a_fused_projection_in_parts(sources: Any) -> None:
    """gpt2: [in, (q, k, v) x heads x width]."""
    block = sources("gpt2").spec.blocks[1]
    name = block.prefix + ".attn.c_attn.weight"
    value, stays = torch.randn(64, 192), torch.tensor([0, 3])
    wanted = value.view(64, 3, 4, 16)[:, :, stays].reshape(64, -1)
    assert torch.equal(cut(block, name, value, Kept(heads=stays)), wanted)
    assert torch.equal(cut(block, name, value, Kept(kv_heads=stays)), wanted)


def test_heads_of_a_fused_projection_head_by_head(sources: Any) -> None:
    """gpt_neox: [heads x (q, k, v) x width, in]."""
    block = sources("gpt_neox").spec.blocks[1]
    module = block.prefix + ".attention.query_key_value"
    value, stays = torch.randn(192, 64), torch.tensor([1, 2])
    wanted = value.view(4, 3, 16, 64)[stays].reshape(-1, 64)
    assert torch.equal(cut(block, module + ".weight", value, Kept(heads=stays)), wanted)
    assert torch.equal(cut(block, module + ".bias", value[:, 0], Kept(heads=stays)), wanted[:, 0])


@pytest.mark.parametrize("heads", [[0, 1, 2], [0, 1], [2], [0, 1, 2, 3][:3]])
def test_uneven_groups_are_our_own_mistake(heads: list[int], sources: Any) -> None:
    block = sources("llama").spec.blocks[0]
    name = block.prefix + ".self_attn.q_proj.weight"
    with pytest.raises(AssertionError, match="equally many"):
        cut(block, name, torch.zeros(64, 64), Kept(heads=torch.tensor(heads)))


@pytest.mark.parametrize("family", TABLED)
def test_all_of_it_is_the_source(family: str, sources: Any) -> None:
    source = sources(family)
    config, state = cut_model(source, Shape(), lambda index: Kept())
    assert config == source.config
    assert list(state) == list(source.state)
    assert all(torch.equal(state[name], value) for name, value in source.state.items())


def test_names_of_experts_and_blocks_move_down(sources: Any) -> None:
    source = sources("mixtral")
    kept, layers = Kept(experts=torch.tensor([1, 3])), (0, 2)
    expert = "model.layers.2.block_sparse_moe.experts.{}.w1.weight"
    moved = "model.layers.1.block_sparse_moe.experts.{}.w1.weight"
    names = [cut_name(source.spec, expert.format(e), kept, layers) for e in range(4)]
    assert names == [None, moved.format(0), None, moved.format(1)]
    assert cut_name(source.spec, "model.layers.1.input_layernorm.weight", kept, layers) is None
    assert cut_name(source.spec, "model.norm.weight", kept, layers) == "model.norm.weight"
    behind = "model.layers.{}.eh_proj.weight"  # a module that predicts further tokens
    assert cut_name(source.spec, behind.format(3), Kept(), layers) == behind.format(2)
    assert cut_name(source.spec, behind.format(4), Kept(), layers) == behind.format(3)
