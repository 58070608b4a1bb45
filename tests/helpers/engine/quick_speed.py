"""What a machine can do at most, measured in a moment: for tests of all but the numbers."""

import pytest

from compress.speed import hollow, rates, timer


def quick_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`roofline` and `bench` read and compute little, once."""
    monkeypatch.setattr(timer, "READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(timer, "SIDES", {"cpu": 64})
    monkeypatch.setattr(hollow, "ALL_PIECES", 1 << 20)
    monkeypatch.setattr(rates, "BURST", 0.0)
    monkeypatch.setattr(timer, "RUNS", 1)
