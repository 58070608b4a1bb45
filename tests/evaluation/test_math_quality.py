"""What rounded inputs cost, through two engines: zero for the same math, small for int16."""

from pathlib import Path

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.errors import RequestError
from compress.evaluation import math_quality, quality
from compress.evaluation.compared import Compared
from compress.evaluation.math_quality import measure_math
from compress.evaluation.text_quality import evaluate
from compress.evaluation.windows import TokenWindows, WindowRule, cut_windows
from compress.evaluation.workspace import Workspace
from compress.events import silent
from compress.formats import Weights, open_weights
from compress.quant.scheme import QuantScheme
from compress.recipe.evaluation_config import EvaluationConfig, TextConfig
from compress_kernels.cpu.library import native
from helpers import compressed_models, tiny_models

pytestmark = pytest.mark.skipif(native().library is None, reason=native().reason)
FAMILIES = ["llama", "gemma2"]  # gemma2: windows, and caps on the logits


def rounded(folder: Path, family: str) -> Weights:
    source = tiny_models.make(family, folder / "source", dtype="fp32")
    compressed_models.write(source, folder / "out", QuantScheme(bits=4, group_size=32))
    return open_weights(Checkpoint.open(folder / "out"))


def texts(vocab: int) -> list[TokenWindows]:
    """Of several windows, one longer than what gemma2's layers see, and one of a single token."""
    random = torch.Generator().manual_seed(0)
    sizes = {"long": (90, 3), "short": (2,)}
    return [
        cut_windows(
            name,
            [torch.randint(vocab, (n,), generator=random).tolist() for n in each],
            WindowRule(48, 24),
        )
        for name, each in sizes.items()
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_is_what_evaluation_measures(tmp_path: Path, family: str) -> None:
    weights = rounded(tmp_path, family)
    given = texts(weights.spec.vocab)
    wanted = evaluate(weights, None, given, EvaluationConfig(), Workspace(tmp_path))
    for found, text in zip(measure_math(weights, given, "exact", silent), wanted, strict=True):
        assert found.perplexity == pytest.approx(text.ppl_result, rel=1e-5)
        assert (found.kl, found.top1_agreement) == (0.0, 1.0)


def test_fewer_bits_cost_more(tmp_path: Path) -> None:
    weights = rounded(tmp_path, "llama")
    given = texts(weights.spec.vocab)
    int16, int8 = (measure_math(weights, given, math, silent) for math in ("int16", "int8"))
    for fine, coarse in zip(int16, int8, strict=True):
        assert 0 < fine.kl < 1e-7
        assert 10 * fine.kl < coarse.kl < 0.01
    assert measure_math(weights, given[:1], "int16", silent) == int16[:1]


def test_dense_weights_have_no_such_products(tmp_path: Path) -> None:
    weights = open_weights(Checkpoint.open(tiny_models.make("llama", tmp_path / "dense")))
    with pytest.raises(RequestError, match="has no products for it"):
        measure_math(weights, texts(weights.spec.vocab), "int8", silent)


def test_an_engine_that_does_not_open_says_so_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for lack of memory: texts and tasks, which take hours, come behind it."""

    def refused(*_: object) -> None:
        raise RequestError("0.0 GiB are free")

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("it was measured first")

    weights = rounded(tmp_path, "llama")
    (tmp_path / "text.txt").write_text("Once upon a time there was a fox.")
    asked = EvaluationConfig(texts=(TextConfig("text", path=str(tmp_path / "text.txt")),))
    for name in ("_texts", "measure_tasks"):
        monkeypatch.setattr(quality, name, measured)
    monkeypatch.setattr(math_quality, "open_engine", refused)
    with pytest.raises(RequestError, match="GiB are free"):
        quality.measure(Compared(weights, None), asked, Workspace(tmp_path / "work"), math="int16")
