"""Codes that move: by one at most, where gradients say so, to less error than rounding left."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from compress.distill import memory, rounding
from compress.distill.coded import Moving, train_codes
from compress.distill.trained import tuned
from compress.quant.rounding import round_to_nearest
from compress.quant.scheme import QuantScheme
from compress.quant.tensor import QuantizedTensor

SYMMETRIC = QuantScheme(bits=4, group_size=8, granularity="group")
ASYMMETRIC = QuantScheme(bits=3, group_size=8, granularity="group", symmetric=False)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(weight: Tensor, scheme: QuantScheme) -> QuantizedTensor:
    return round_to_nearest(weight, scheme, torch.ones(1), scale_dtype=torch.float32)


@pytest.mark.parametrize("scheme", [SYMMETRIC, ASYMMETRIC])
def test_it_begins_at_the_codes_that_are_there(scheme: QuantScheme) -> None:
    weight = random(6, 16)
    tensor = rounded(weight, scheme)
    for dense in (weight, weight + 10, -weight):  # other stages leave more than half a code
        place = rounding.begin(tensor, dense)
        assert place.abs().max() < 0.5
        assert torch.equal(weight, random(6, 16))
        ends = scheme.code_min, scheme.code_max
        assert torch.equal(rounding.moved(tensor.codes, place, ends), tensor.codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_code_moves_by_one_at_most_and_stays_in_its_range(bits: int) -> None:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    codes = torch.tensor([[low, low, 0, 0, high, high]], dtype=torch.int8)
    place = torch.tensor([[-3.0, 0.6, 2.7, -0.4, 0.9, -0.6]])
    found = rounding.moved(codes, place, (low, high))
    assert found.tolist() == [[low, low + 1, 1, 0, high, high - 1]]


def test_gradients_pass_the_rounding_but_at_the_ends() -> None:
    codes = torch.tensor([[-8, 0, 7]], dtype=torch.int8)
    place = torch.tensor([[-0.7, 0.7, 0.2]], requires_grad=True)
    scale = torch.tensor([[2.0, 4.0]], requires_grad=True)
    zero, groups = torch.tensor([[-1, 3]], dtype=torch.int8), torch.tensor([0, 0, 1])
    grid = rounding.CodeGrid(zero, groups, (-8, 7))
    weight = rounding.MovedProduct.apply(scale, place, codes, grid)
    assert weight.tolist() == [[-14.0, 4.0, 16.0]]
    (weight * torch.tensor([[1.0, 10.0, 100.0]])).sum().backward()
    assert place.grad is not None
    assert place.grad.tolist() == [[0.0, 20.0, 400.0]]
    assert scale.grad is not None
    assert scale.grad.tolist() == [[-7.0 + 20.0, 400.0]]


@pytest.mark.parametrize("transposed", [False, True])
def test_offsets_of_nothing_are_the_weight_as_it_was(transposed: bool) -> None:
    weight = random(6, 16)
    tensor = rounded(weight, ASYMMETRIC)
    model = nn.Module()
    model.linear = nn.Linear(6, 16) if transposed else nn.Linear(16, 6)
    moving = Moving(lambda name: weight.t() if transposed else weight, 1.0)
    (coded,) = train_codes(model, {"w": "linear"}, {"w": (tensor, transposed)}, moving)
    now = model.get_parameter("linear.parametrizations.weight.original1")
    assert now is coded.offset
    found = model.linear.weight
    assert torch.equal(found.t() if transposed else found, tensor.dequantize())
    with torch.no_grad():
        now.fill_(1.0)
    settled = coded.settle()
    assert isinstance(settled, QuantizedTensor)
    top = tensor.codes == ASYMMETRIC.code_max
    assert torch.equal(settled.codes, torch.where(top, tensor.codes, tensor.codes + 1))
    found = model.linear.weight
    assert torch.equal(found.t() if transposed else found, settled.dequantize())
    coded.undo()
    found = model.linear.weight
    assert torch.equal(found.t() if transposed else found, tensor.dequantize())


def test_it_finds_the_best_of_all_neighbours() -> None:
    """One row of six weights, inputs that depend on one another; brute force over 3^6 moves."""
    scheme = QuantScheme(bits=3, group_size=6, granularity="group")
    inputs = random(64, 3) @ random(3, 6, seed=1) + 0.1 * random(64, 6, seed=2)
    weight = random(1, 6, seed=7)
    tensor = rounded(weight, scheme)

    def error(codes: Tensor) -> float:
        return float((inputs @ (codes * tensor.steps() - weight).t()).square().mean())

    moves = torch.tensor(list(product((-1, 0, 1), repeat=6)), dtype=torch.int8)
    every = (tensor.codes + moves).clamp(scheme.code_min, scheme.code_max)
    best = min(error(codes[None]) for codes in every)
    model = nn.Module()
    model.linear = nn.Linear(6, 1, bias=False)
    moving = Moving(lambda name: weight, 1.0)
    trained = tuned(model, {}, {"w": "linear"}, {"w": (tensor, False)}, ["rounding"], moving)
    assert list(trained.parameters) == ["w.offset"]
    optimizer = torch.optim.Adam(trained.parameters.values(), lr=0.02)
    tries = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model.linear(inputs) - inputs @ weight.t()).square().mean()
        tries.append(loss.item())
        torch.autograd.backward(loss)
        optimizer.step()
    assert tries[0] == pytest.approx(error(tensor.codes))
    assert min(tries) == pytest.approx(best)
    assert best < 0.1 * tries[0]


def test_what_a_moving_code_holds_is_what_the_estimate_has() -> None:
    """Where it begins, its code, and what autograd keeps: the weight, the code it moved to and
    whether it was free; beside its offset, which stands for the weight of other trainings."""
    weight = random(64, 64)
    tensor = rounded(weight, QuantScheme(bits=4, group_size=64, granularity="group"))
    model = nn.Module()
    model.linear = nn.Linear(64, 64, bias=False)
    (coded,) = train_codes(
        model, {"w": "linear"}, {"w": (tensor, False)}, Moving(lambda _: weight, 1)
    )
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        if saved.shape == weight.shape:
            kept[saved.untyped_storage().data_ptr()] = saved.nbytes
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        found = model.linear(random(8, 64).requires_grad_())
    assert found.requires_grad
    assert coded.weight.begin is not None
    held = coded.weight.begin.nbytes + coded.weight.codes.nbytes + sum(kept.values())
    assert held == memory._MOVED * weight.numel()
