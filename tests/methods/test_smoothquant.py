"""SmoothQuant's scale from its equation, and what it does to the largest inputs and weights."""

from dataclasses import replace

import pytest
import torch

from compress.arch.spec import FoldPair
from compress.errors import RecipeError
from compress.methods import smoothquant
from compress.methods.folding import UNDRIVEN, FoldReader, PairView, expand
from compress.methods.smoothquant import SmoothQuantConfig
from compress.quant.scheme import PRESETS


def view_of(kind: str = "norm", repeat: int = 1) -> PairView:
    g = torch.Generator().manual_seed(0)
    pair = FoldPair("w", kind, ("w.weight",), (0, 8), ("r",), "in", repeat, 4)
    x = torch.randn(50, 8 * repeat, generator=g) * expand(pair, torch.tensor([40.0] + [1.0] * 7))
    readers = tuple(
        FoldReader(torch.randn(n, 8 * repeat, generator=g), PRESETS["W8A8"]) for n in (5, 9)
    )
    return PairView(pair, readers, x.T @ x / 50, x.abs().amax(0), x.abs().mean(0))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_equation_4(alpha: float) -> None:
    view = view_of()
    scale = smoothquant.search(view, SmoothQuantConfig(alpha=alpha)).scale
    assert scale is not None
    w = torch.cat([reader.weight for reader in view.readers]).abs().amax(0)
    torch.testing.assert_close(scale, view.absmax**alpha / w ** (1 - alpha))
    # What is left for either side: the two maxima to the powers 1 - alpha and alpha.
    torch.testing.assert_close(view.absmax / scale, (view.absmax * w) ** (1 - alpha))
    torch.testing.assert_close(w * scale, (view.absmax * w) ** alpha)


def test_half_makes_inputs_and_weights_equally_large() -> None:
    view = view_of()
    scale = smoothquant.search(view, SmoothQuantConfig()).scale
    assert scale is not None
    w = torch.cat([reader.weight for reader in view.readers]).abs().amax(0)
    torch.testing.assert_close(view.absmax / scale, w * scale)
    before, after = view.absmax, view.absmax / scale
    assert after.max() / after.median() < 0.4 * before.max() / before.median()


def test_a_channel_is_as_large_as_the_largest_column_that_reads_it() -> None:
    view = view_of("linear", repeat=2)
    scale = smoothquant.search(view, SmoothQuantConfig(pairs="all")).scale
    assert scale is not None
    x = view.absmax.reshape(2, 2, 4).amax(1).reshape(-1)  # [kv_heads, repeat, head_dim]
    w = torch.cat([reader.weight for reader in view.readers]).abs().amax(0)
    w = w.reshape(2, 2, 4).amax(1).reshape(-1)
    torch.testing.assert_close(scale, (x / w).sqrt())


def test_linears_are_folded_into_only_when_asked() -> None:
    choice = smoothquant.search(view_of("linear"), SmoothQuantConfig())
    assert choice.scale is None
    assert choice.note == "pairs is norms"
    empty = smoothquant.search(replace(view_of(), readers=()), SmoothQuantConfig())
    assert empty.scale is None


def test_channels_nobody_drives_or_reads_keep_scale_1() -> None:
    view = view_of()
    quiet = view.absmax.clone()
    quiet[2] = 0
    readers = tuple(replace(r, weight=r.weight.clone()) for r in view.readers)
    for reader in readers:
        reader.weight[:, 5] = 0
    config = SmoothQuantConfig()
    scale = smoothquant.search(replace(view, absmax=quiet, readers=readers), config).scale
    assert scale is not None
    assert scale[2] == scale[5] == 1
    assert bool(torch.isfinite(scale).all())
    silent = smoothquant.search(replace(view, absmax=quiet * 0), config)
    assert (silent.scale, silent.note) == (None, UNDRIVEN)


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan")])
def test_alpha_is_a_share(alpha: float) -> None:
    with pytest.raises(RecipeError, match=r"alpha is .*; it is a share from 0 to 1"):
        SmoothQuantConfig(alpha=alpha)
