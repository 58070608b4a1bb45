"""k-quants on their own objective: weighed, compensated, and never worse than rounding alone."""

import pytest
import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.methods.k_quants import (
    KQuantsConfig,
    compensate,
    factorise,
    needs,
    round_weights,
)
from compress.methods.observed import Observed
from compress.methods.outcome import relative_error
from compress_kernels import decode_blocks
from compress_kernels.blocks.layouts import LAYOUTS

PLAIN = KQuantsConfig(compensate=False)


def driven(columns: int, seed: int = 0) -> Tensor:
    """A Hessian whose columns go together and are driven by unequal strength."""
    seeded = torch.Generator().manual_seed(seed)
    mixed = torch.randn(columns, columns, generator=seeded) / columns**0.5
    x = torch.randn(2 * columns, columns, generator=seeded) @ (mixed + 0.5 * torch.eye(columns))
    x *= torch.rand(columns, generator=seeded) + 0.1
    return x.T @ x / (2 * columns)


def weight(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(9)) * 0.05


@pytest.mark.parametrize("kind", LAYOUTS)
def test_compensation_lowers_the_error_it_reports(kind: str) -> None:
    w, hessian = weight(24, 512), driven(512)
    (plain,) = round_weights([w], kind, PLAIN, Observed(hessian))
    (best,) = round_weights([w], kind, KQuantsConfig(), Observed(hessian))
    assert (plain.method, best.method, best.kept) == ("k_quants", "k_quants+gptq", None)
    assert best.error < 0.85 * plain.error
    for found in (plain, best):
        assert found.error == relative_error(w, decode_blocks(kind, found.data), hessian)


def test_layers_of_one_input_are_rounded_as_each_alone() -> None:
    first, second, hessian = weight(8, 256), weight(24, 256)[8:], driven(256)
    both = round_weights([first, second], "Q4_K", KQuantsConfig(), Observed(hessian))
    for w, found in zip((first, second), both, strict=True):
        (alone,) = round_weights([w], "Q4_K", KQuantsConfig(), Observed(hessian))
        assert torch.equal(alone.data, found.data)


def test_rows_that_are_no_whole_super_blocks_are_compensated_too() -> None:
    w, hessian = weight(8, 352), driven(352)
    (plain,) = round_weights([w], "Q5_1", PLAIN, Observed(hessian))
    (best,) = round_weights([w], "Q5_1", KQuantsConfig(), Observed(hessian))
    assert best.data.shape == (8, 352 // 32 * 24)
    assert best.error < 0.9 * plain.error


def test_without_data_columns_count_alike() -> None:
    w = weight(8, 256)
    (found,) = round_weights([w], "Q4_K", KQuantsConfig())
    assert (found.method, found.kept) == ("k_quants", None)
    assert found.error == relative_error(w, decode_blocks("Q4_K", found.data), None)
    assert not needs(KQuantsConfig(compensate=False, importance=False)).data


def test_experts_that_few_tokens_reach_are_not_compensated() -> None:
    w, hessian = weight(8, 256), driven(256)
    (few,) = round_weights([w], "Q4_K", KQuantsConfig(), Observed(hessian, None, 20))
    assert few.kept == "20 tokens reached the expert, 2 x 256 wanted"
    (none,) = round_weights([w], "Q4_K", KQuantsConfig(), Observed(hessian * 0, None, 0))
    assert none.kept == "no token reached the expert: its columns count alike"
    assert torch.equal(none.data, round_weights([w], "Q4_K", PLAIN)[0].data)


def test_a_hessian_without_a_factor_leaves_rounding_alone() -> None:
    w, hessian = weight(4, 256), -driven(256)
    hessian.diagonal().abs_()
    hessian[0, 1] = hessian[1, 0] = torch.nan
    (found,) = round_weights([w], "Q4_K", KQuantsConfig(), Observed(hessian))
    assert found.kept == "the Hessian is not positive definite under any damping"


def test_columns_that_are_never_driven_stay_near() -> None:
    w, hessian = weight(16, 256), driven(256)
    hessian[:40], hessian[:, :40] = 0, 0
    (found,) = round_weights([w], "Q4_K", KQuantsConfig(), Observed(hessian))
    apart = decode_blocks("Q4_K", found.data) - w
    assert apart[:, :40].square().mean() < 0.05 * w.square().mean()


def test_order_of_visits() -> None:
    """Blocks by falling sum of H_ii, their columns by falling H_ii; data as it is stored."""
    strength = torch.cat((torch.linspace(1, 2, 256), torch.linspace(5, 3, 256)))
    factor = factorise(torch.diag(strength), 256, 0.0)
    assert factor is not None
    assert factor.order.tolist() == [*range(256, 512), *range(255, -1, -1)]
    w = weight(4, 512)
    (plain,) = round_weights([w], "Q6_K", PLAIN, Observed(torch.diag(strength)))
    assert torch.equal(compensate(w, "Q6_K", factor), plain.data)


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(RecipeError, match="damping is -1; it is 0 or more"):
        KQuantsConfig(damping=-1)
