"""NaN and infinity are counted and placed, in every float dtype and at chunk borders."""

from pathlib import Path

import pytest
import torch

from compress.checkpoint import Checkpoint, NonFinite, find_nonfinite, scan, scanning
from compress.checkpoint.shards import finite
from helpers.raw_checkpoints import folder_of

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e5m2,
        torch.complex64,
    ],
)
def test_counts_and_first_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "_CHUNK", 7)
    values = torch.ones(4, 3, 5)
    assert find_nonfinite(values.to(dtype)) is None
    values[1, 2, 3], values[2, 0, 0], values[3, 2, 4] = INF, NAN, -INF
    assert find_nonfinite(values.to(dtype)) == NonFinite(1, 2, (1, 2, 3))


def test_largest_finite_values_pass() -> None:
    big = torch.tensor([torch.finfo(torch.float64).max, -1e300], dtype=torch.float64)
    assert find_nonfinite(big) is None
    mixed = torch.tensor([1e300, NAN], dtype=torch.float64)
    assert find_nonfinite(mixed) == NonFinite(1, 0, (1,))


def test_e4m3_and_e8m0_have_only_nan() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        values = torch.tensor([1, 255], dtype=torch.uint8).view(dtype)
        assert find_nonfinite(values) == NonFinite(1, 0, (1,))


def test_integers_scalars_and_empty_tensors() -> None:
    assert find_nonfinite(torch.tensor([2**31 - 1], dtype=torch.int32)) is None
    assert find_nonfinite(torch.tensor(NAN)) == NonFinite(1, 0, ())
    assert find_nonfinite(torch.zeros(0, 4)) is None
    assert find_nonfinite(torch.full((2, 3), INF).T) == NonFinite(0, 6, (0, 0))


def test_scan_of_a_checkpoint_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "SLICE_BYTES", 24)
    bad = torch.zeros(9, 2)
    bad[4, 1], bad[8, 0] = NAN, INF
    tensors = {"bad": bad, "good": torch.ones(5, 2), "one": torch.ones(3), "e": torch.zeros(0, 2)}
    found = dict(scan(Checkpoint.open(folder_of(tmp_path, tensors))))
    assert found == {"bad": NonFinite(1, 1, (4, 1)), "good": None, "one": None, "e": None}
