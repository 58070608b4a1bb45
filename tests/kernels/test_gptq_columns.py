"""The column loop: a textbook loop in float64, plain rounding, and compiled against reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress_kernels import (
    ColumnResult,
    FixedScales,
    Grid,
    SearchedScales,
    gptq_columns,
    group_scale,
    hessian_factor,
)
from compress_kernels.cpu import columns as cpu
from compress_kernels.cpu.library import native
from compress_kernels.gptq.problem import Problem
from compress_kernels.reference import columns as reference

RATIOS = torch.linspace(1.0, 0.6, 9)
BOTH = torch.cat([RATIOS, -RATIOS])  # for symmetric grids
needs_native = pytest.mark.skipif(native().library is None, reason=native().reason)
IMPLEMENTATIONS = [reference.gptq_columns, pytest.param(cpu.gptq_columns, marks=needs_native)]


def correlated_hessian(columns: int) -> Tensor:
    x = torch.randn(2 * columns, columns) @ torch.randn(columns, columns) / columns**0.5
    h = x.T @ x / len(x)
    h.diagonal().add_(0.01 * h.diagonal().mean())
    return h


def make_problem(
    columns: int, group_size: int, bits: int = 4, symmetric: bool = True, block: int = 128
) -> Problem:
    groups = (torch.arange(columns) // group_size).to(torch.int32)
    grid = Grid(bits, symmetric, torch.bfloat16)
    ratios = BOTH if symmetric else RATIOS
    return Problem(grid, group_size, ratios, None, None, None, groups, block)


def with_fixed_scales(problem: Problem, weight: Tensor, groups: Tensor) -> Problem:
    """Scales of the groups as they are, columns given in any order."""
    count = int(groups.max()) + 1
    scales, zeros = [], []
    for group in range(count):
        columns = weight[:, groups == group]
        grid = problem.grid
        scale, zero = group_scale(
            columns, problem.ratios, None, grid.bits, grid.symmetric, grid.scale_dtype
        )
        scales.append(scale)
        zeros.append(zero)
    kept = None if problem.grid.symmetric else torch.stack([z for z in zeros if z is not None], 1)
    return replace(problem, scale=torch.stack(scales, 1), zero=kept, groups=groups)


def objective(weight: Tensor, quantized: Tensor, h: Tensor) -> float:
    lost = (weight - quantized).double()
    return float(((lost @ h.double()) * lost).sum())


def textbook(weight: Tensor, h: Tensor, problem: Problem) -> Tensor:
    """Optimal brain quantization in a fixed order, float64, eq. 2 and 3 with explicit inverses."""
    w = weight.double().clone()
    codes = torch.empty_like(w)
    for k in range(w.shape[1]):
        inverse = torch.linalg.inv(h[k:, k:].double())
        if k % problem.group_size == 0:
            part = w[:, k : k + problem.group_size].float()
            grid = problem.grid
            scale, zero = group_scale(
                part, problem.ratios, None, grid.bits, grid.symmetric, grid.scale_dtype
            )
        z = torch.zeros_like(scale).double() if zero is None else zero.double()
        codes[:, k] = ((w[:, k] / scale).round() + z).clamp(
            problem.grid.code_min, problem.grid.code_max
        )
        error = (w[:, k] - (codes[:, k] - z) * scale) / inverse[0, 0]
        w[:, k:] -= torch.outer(error, inverse[0])
    return codes.to(torch.int8)


@pytest.mark.parametrize("solve", IMPLEMENTATIONS)
@pytest.mark.parametrize(("group_size", "block"), [(8, 16), (12, 16), (40, 16), (24, 8), (16, 128)])
def test_equals_the_textbook(solve, group_size: int, block: int) -> None:
    torch.manual_seed(group_size)
    for symmetric in (True, False):
        weight, h = torch.randn(10, 40), correlated_hessian(40)
        problem = make_problem(40, group_size, 3, symmetric, block)
        result = solve(weight, hessian_factor(h), problem)
        assert torch.equal(result.codes, textbook(weight, h, problem))


@pytest.mark.parametrize("solve", IMPLEMENTATIONS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_identity_hessian_is_plain_rounding(solve, symmetric: bool) -> None:
    weight = torch.randn(21, 96)
    problem = make_problem(96, 32, 4, symmetric)
    result = solve(weight, torch.eye(96), problem)
    for g in range(3):
        part = weight[:, 32 * g : 32 * g + 32]
        scale, zero = group_scale(part, problem.ratios, None, 4, symmetric, torch.bfloat16)
        assert torch.equal(result.scale[:, g], scale)
        z = torch.zeros_like(scale) if zero is None else zero.float()
        codes = ((part / scale[:, None]).round() + z[:, None]).clamp(-8, 7)
        assert torch.equal(result.codes[:, 32 * g : 32 * g + 32].float(), codes)


def assert_same(got: ColumnResult, want: ColumnResult, weight: Tensor, h: Tensor) -> None:
    assert (got.codes == want.codes).float().mean() >= 0.999
    assert objective(weight, got.quantized, h) == pytest.approx(
        objective(weight, want.quantized, h), rel=1e-4
    )


@needs_native
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [4, 12, 32, 96, 128, 256, 300])
def test_compiled_equals_reference(group_size: int, symmetric: bool) -> None:
    torch.manual_seed(group_size)
    weight, h = torch.randn(37, 300), correlated_hessian(300)  # short last group, ragged rows
    factor = hessian_factor(h)
    problem = replace(make_problem(300, group_size, 4, symmetric), importance=torch.rand(300) + 0.1)
    got = cpu.gptq_columns(weight, factor, problem)
    assert_same(got, reference.gptq_columns(weight, factor, problem), weight, h)
    assert consistent(got, problem)


def consistent(result: ColumnResult, problem: Problem) -> bool:
    """quantized is what codes, scale and zero stand for, bit by bit."""
    groups = problem.groups.long()
    zero = 0.0 if result.zero is None else result.zero.float()[:, groups]
    values = (result.codes.float() - zero) * result.scale[:, groups]
    return torch.equal(values, result.quantized)


@needs_native
@pytest.mark.parametrize("bits", range(2, 9))
def test_compiled_equals_reference_at_all_widths(bits: int) -> None:
    torch.manual_seed(bits)
    weight, h = torch.randn(19, 160), correlated_hessian(160)
    factor = hessian_factor(h)
    for symmetric in (True, False):
        problem = make_problem(160, 32, bits, symmetric)
        got = cpu.gptq_columns(weight, factor, problem)
        assert_same(got, reference.gptq_columns(weight, factor, problem), weight, h)
        assert got.codes.min() >= problem.grid.code_min
        assert got.codes.max() <= problem.grid.code_max


@needs_native
@pytest.mark.parametrize("symmetric", [True, False])
def test_compiled_equals_reference_with_act_order(symmetric: bool) -> None:
    torch.manual_seed(3)
    weight, h = torch.randn(33, 200), correlated_hessian(200)
    order = torch.argsort(h.diagonal(), descending=True)
    groups = (order // 64).to(torch.int32)
    weight, h = weight[:, order], h[order][:, order]
    problem = with_fixed_scales(make_problem(200, 64, 4, symmetric), weight, groups)
    factor = hessian_factor(h)
    got = cpu.gptq_columns(weight, factor, problem)
    assert_same(got, reference.gptq_columns(weight, factor, problem), weight, h)
    assert torch.equal(got.scale, problem.scale)
    assert consistent(got, problem)


@needs_native
def test_threads_do_not_change_the_result() -> None:
    weight, factor = torch.randn(600, 128), hessian_factor(correlated_hessian(128))
    problem = make_problem(128, 32)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            results.append(cpu.gptq_columns(weight, factor, problem))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0].codes, other.codes) for other in results[1:])


def test_beats_plain_rounding_on_its_objective() -> None:
    torch.manual_seed(0)
    weight, h = torch.randn(32, 128), correlated_hessian(128)
    problem = make_problem(128, 32)
    gptq = reference.gptq_columns(weight, hessian_factor(h), problem).quantized
    plain = reference.gptq_columns(weight, torch.eye(128), problem).quantized
    assert objective(weight, gptq, h) < 0.7 * objective(weight, plain, h)


def test_public_op_leaves_its_arguments_alone() -> None:
    weight, factor = torch.randn(8, 48).T.contiguous().T, hessian_factor(correlated_hessian(48))
    before = weight.clone()
    result = call(weight=weight, factor=factor)
    assert torch.equal(weight, before)
    assert result.codes.shape == (8, 48)
    assert result.scale.shape == (8, 3)
    fixed = FixedScales(result.scale, groups=torch.arange(48) // 16)
    again = call(weight=weight, factor=factor, scales=fixed)
    assert torch.equal(again.codes, result.codes)


def call(**change: object) -> ColumnResult:
    arguments: dict[str, object] = {
        "weight": torch.randn(4, 48),
        "factor": torch.eye(48),
        "grid": Grid(4, True, torch.bfloat16),
        "group_size": 16,
        "scales": SearchedScales(RATIOS),
    }
    return gptq_columns(**{**arguments, **change})


ONES = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4, 48).bfloat16()}, "weight is torch.bfloat16; torch.float32"),
        ({"weight": torch.zeros(0, 48)}, "weight is shape [0, 48]; [N, K], not empty"),
        ({"factor": torch.eye(47)}, "factor is shape [47, 47]; [48, 48] is needed"),
        ({"group_size": 0}, "group_size is 0; 1 or more"),
        ({"block": 0}, "block is 0; 1 or more"),
        ({"grid": Grid(9, True, torch.bfloat16)}, "bits is 9; 2 to 8"),
        ({"scales": SearchedScales(RATIOS, torch.ones(4))}, "importance is shape [4]; [48]"),
        ({"scales": FixedScales(torch.ones(3, 3))}, "scale is shape [3, 3]; [4, groups]"),
        ({"scales": FixedScales(ONES / 10)}, "scale is not exact in torch.bfloat16"),
        (
            {"scales": FixedScales(ONES), "grid": Grid(4, False, torch.bfloat16)},
            "zero is missing",
        ),
        ({"scales": FixedScales(ONES, ONES)}, "zero is given; a zero for asymmetric codes"),
        ({"scales": FixedScales(ONES[:, :2])}, "groups is in [0, 2]; [0, 1] is needed"),
        ({"scales": FixedScales(ONES, groups=torch.zeros(48))}, "groups is torch.float32"),
    ],
)
def test_misuse(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call(**change)
    assert message in str(error.value)
