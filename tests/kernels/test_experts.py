"""The experts of a token: those of torch's softmax, in an order that leaves nothing open."""

import pytest
import torch

from compress_kernels.cpu import experts as compiled
from compress_kernels.cpu.library import native
from compress_kernels.ops import experts as ops
from compress_kernels.reference import experts as reference

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("experts", "chosen"), [(4, 2), (8, 8), (60, 4), (128, 8)])
def test_choice(experts: int, chosen: int, normalised: bool) -> None:
    logits = torch.randn(40, experts) * 3
    shares, index = compiled.choose_experts(logits, chosen, normalised)
    wanted = reference.choose_experts(logits, chosen, normalised)
    assert torch.equal(index, wanted[1])
    torch.testing.assert_close(shares, wanted[0], atol=1e-7, rtol=2e-6)
    order = torch.randperm(len(logits))[:7]
    alone = compiled.choose_experts(logits[order].repeat(3, 1), chosen, normalised)
    assert torch.equal(alone[0][7:14], shares[order])
    assert torch.equal(alone[1][7:14], index[order])


def test_of_equals_the_lowest_number() -> None:
    logits = torch.tensor([[1.0, 2, 1, 2, 1], [0, -300, -200, 0, -400]])
    for way in (compiled, reference):
        assert way.choose_experts(logits, 4, True)[1].tolist() == [[1, 3, 0, 2], [0, 3, 1, 2]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_no_share(value: float) -> None:
    logits = torch.zeros(2, 20)
    logits[0, 7] = value
    shares, index = compiled.choose_experts(logits, 3, True)
    assert shares[0].isnan().all()
    assert index.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(shares[1], torch.full((3,), 1 / 3))


def test_wrong_arguments_are_named() -> None:
    for logits in (torch.zeros(2, 3), torch.zeros(2, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"logits is .*; torch.float32 \[tokens, 4 or more\]"):
            ops.choose_experts(logits, 4, True)
