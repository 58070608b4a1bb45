"""The two ways to a number: whole texts streamed block by block, and the same windows scored by the
engine. Two forwards, two attentions, two ways to decode weights."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.evaluation.divergence import kl
from compress.evaluation.text_quality import TextScores, evaluate
from compress.evaluation.texts import read_windows
from compress.evaluation.windows import TokenWindows
from compress.evaluation.workspace import Workspace
from compress.formats import open_weights
from compress.quant.scheme import PRESETS, QuantScheme
from compress.recipe.evaluation_config import EvaluationConfig, TextConfig
from compress.runtime.engine.engine import Engine
from compress.runtime.engine.runner import LocalRunner
from compress.runtime.loading.open_engine import Opening, open_engine
from compress.runtime.sequences.limits import Limits
from compress.runtime.sequences.request import Request, RequestResult
from compress.text.tokenizer import load_tokenizer
from helpers import compressed_models

AGREE = 1e-5  # nats a token
FEW = (pytest.param("tale-6m", marks=pytest.mark.long), "stories260K")
CONFIG = EvaluationConfig(window=128, stride=64)


@pytest.fixture(scope="module")
def stories(shared_dir: Path) -> TextConfig:
    file = shared_dir / "text" / "tinystories" / "tinystories_test.txt"
    return TextConfig("stories", path=str(file), max_documents=2)


def windows_of(folder: Path, stories: TextConfig) -> TokenWindows:
    return read_windows(stories, CONFIG, load_tokenizer(folder), 512)


def rounded(source: Path, folder: Path, scheme: QuantScheme) -> Path:
    compressed_models.write(source, folder, scheme)
    return folder


def streamed(folder: Path, source: Path | None, windows: TokenWindows, work: Path) -> TextScores:
    result = open_weights(Checkpoint.open(folder))
    beside = None if source is None else open_weights(Checkpoint.open(source))
    return evaluate(result, beside, [windows], CONFIG, Workspace(work))[0]


def opened(folder: Path) -> Engine:
    limits = Limits(sequences=8)
    return open_engine(open_weights(Checkpoint.open(folder)), Opening(limits=limits))[0]


def requests(windows: TokenWindows) -> list[Request]:
    rows = zip(windows.ids.tolist(), windows.lengths.tolist(), windows.first.tolist(), strict=True)
    return [
        Request(f"window {i}", tuple(ids[:length]), score_from=first)
        for i, (ids, length, first) in enumerate(rows)
    ]


def scored(folder: Path, windows: TokenWindows) -> list[RequestResult]:
    results = opened(folder).generate(requests(windows))
    assert sum(len(result.tokens) for result in results) == windows.scored
    return results


@pytest.fixture(scope="module")
def of_source(shared_dir: Path, stories: TextConfig) -> Callable[[str], list[RequestResult]]:
    """What the engine says of a dense model's windows, scored once."""
    made: dict[str, list[RequestResult]] = {}

    def get(name: str) -> list[RequestResult]:
        if name not in made:
            source = shared_dir / "models" / name
            made[name] = scored(source, windows_of(source, stories))
        return made[name]

    return get


def mean_nll(results: list[RequestResult]) -> float:
    return float(nlls(results).mean())


def nlls(results: list[RequestResult]) -> Tensor:
    """fp64 [tokens]."""
    each = [-report.logprob for result in results for report in result.logprobs]
    return torch.tensor(each, dtype=torch.float64)


@pytest.mark.parametrize("scheme", [None, QuantScheme(bits=4, group_size=4)], ids=["dense", "int4"])
@pytest.mark.parametrize("name", FEW)
def test_both_ways_agree(
    name: str,
    scheme: QuantScheme | None,
    shared_dir: Path,
    stories: TextConfig,
    of_source: Callable[[str], list[RequestResult]],
    tmp_path: Path,
) -> None:
    source = shared_dir / "models" / name
    folder = source if scheme is None else rounded(source, tmp_path / "out", scheme)
    windows = windows_of(source, stories)
    found = streamed(folder, None, windows, tmp_path)
    results = of_source(name) if scheme is None else scored(folder, windows)
    assert abs(math.log(found.ppl_result) - mean_nll(results)) < AGREE


class Watched:
    """A decoder whose logits are kept."""

    def __init__(self, decoder: object) -> None:
        self.inner, self.seen = decoder, []

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def logits(self, hidden: Tensor) -> Tensor:
        found = self.inner.logits(hidden)
        self.seen.append(found)
        return found


def distributions(folder: Path, windows: TokenWindows) -> Tensor:
    """Log-probabilities [scored tokens, vocabulary] of an engine that reads a window at a time."""
    engine = opened(folder)
    watched = Watched(engine.runner.decoder)
    engine.runner = LocalRunner(watched, engine.runner.cache)
    rows = []
    for request in requests(windows):
        watched.seen = []
        (result,) = engine.generate([request])
        (logits,) = watched.seen  # one step, one chunk of rows
        rows.append(logits[: len(result.tokens)].log_softmax(-1))
    return torch.cat(rows)


def test_the_divergence_agrees_too(shared_dir: Path, stories: TextConfig, tmp_path: Path) -> None:
    source = shared_dir / "models" / "stories260K"
    folder = rounded(source, tmp_path / "out", QuantScheme(bits=4, group_size=4))
    windows = windows_of(source, stories)
    p, q = distributions(source, windows), distributions(folder, windows)
    found = streamed(folder, source, windows, tmp_path)
    assert found.kl is not None
    assert found.kl > 0.01
    assert abs(found.kl - float(kl(p, q).mean())) < AGREE
    assert found.top1_agreement == pytest.approx(
        float((p.argmax(-1) == q.argmax(-1)).double().mean())
    )


@pytest.mark.parametrize("name", FEW)
def test_rounded_inputs_agree_but_for_chance(
    name: str,
    shared_dir: Path,
    stories: TextConfig,
    of_source: Callable[[str], list[RequestResult]],
    tmp_path: Path,
) -> None:
    """W8A8 has no value to 1e-5: inputs that differ in their last bit go to other codes, which goes
    on from layer to layer. What is left must be noise: tokens differ either way, and their mean by
    no more than four of its standard errors."""
    source = shared_dir / "models" / name
    folder = rounded(source, tmp_path / "out", PRESETS["W8A8"])
    windows = windows_of(source, stories)
    found = streamed(folder, None, windows, tmp_path)
    ours, plain = nlls(scored(folder, windows)), nlls(of_source(name))
    noise = float((ours - plain).std()) / math.sqrt(len(ours))
    assert 0 < noise < 4e-3
    assert abs(math.log(found.ppl_result) - float(ours.mean())) < 4 * noise
