"""A scheme's short name: whoever compares names must not take different schemes for one."""

import pytest

from compress.quant.scheme import ActivationScheme


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (ActivationScheme(), "a8"),
        (ActivationScheme(granularity="tensor", dynamic=False), "a8 static"),
        (ActivationScheme(type="float"), "a-fp8"),
        (ActivationScheme(outliers="dynamic"), "a8 dynamic outliers"),
        (ActivationScheme(outliers="calibrated", threshold=4), "a8 calibrated outliers>=4"),
        (ActivationScheme(outliers="dynamic", threshold=6.5), "a8 dynamic outliers>=6.5"),
        (ActivationScheme(outliers="dynamic", threshold=10.0), "a8 dynamic outliers>=10"),
        (ActivationScheme(threshold=4.0), "a8"),
    ],
)
def test_inputs(scheme: ActivationScheme, words: str) -> None:
    assert scheme.describe() == words
