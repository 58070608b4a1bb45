"""Windows: every token is scored exactly once, with the context it was promised."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import RecipeError
from compress.evaluation.batches import make_batches
from compress.evaluation.windows import TokenWindows, WindowRule, cut_windows, spans
from compress.recipe.evaluation_config import EvaluationConfig, TextConfig

shapes = st.integers(2, 40).flatmap(
    lambda window: st.tuples(st.integers(0, 200), st.just(window), st.integers(1, window - 1))
)


@given(shapes)
def test_every_token_is_scored_once_with_enough_context(shape: tuple[int, int, int]) -> None:
    length, window, stride = shape
    scored: list[int] = []
    for index, span in enumerate(spans(length, window, stride)):
        assert 0 <= span.start < span.first < span.stop <= length
        assert span.stop - span.start <= window
        least = 1 if index == 0 else window - stride
        assert span.first - span.start >= least
        scored += range(span.first, span.stop)
    assert scored == list(range(1, length))


@given(
    st.lists(st.lists(st.integers(1, 99), max_size=30), max_size=6),
    st.integers(2, 12),
    st.data(),
)
def test_windows_hold_the_tokens_of_their_spans(
    sequences: list[list[int]], window: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, window - 1))
    windows = cut_windows("t", sequences, WindowRule(window, stride))
    scored = [
        int(token)
        for row, length, first in zip(windows.ids, windows.lengths, windows.first, strict=True)
        for token in row[first:length]
    ]
    assert scored == [token for sequence in sequences for token in sequence[1:]]
    assert windows.scored == len(scored)


def test_cut_scores_the_first_window_of_each_document_only() -> None:
    windows = cut_windows("t", [range(1, 30), range(40, 44)], WindowRule(8, 4, cut=True))
    assert windows.lengths.tolist() == [8, 4]
    assert windows.scored == 7 + 3


@given(
    st.lists(st.lists(st.integers(1, 99), max_size=30), max_size=6),
    st.integers(1, 99),
    st.booleans(),
)
def test_max_tokens_are_scored_and_no_more(
    sequences: list[list[int]], limit: int, cut: bool
) -> None:
    """The first of all, each with the context that it has without a limit."""

    def scored(most: int | None) -> list[list[int]]:
        found = cut_windows("t", sequences, WindowRule(8, 3, cut=cut, max_tokens=most))
        return [
            row[: at + 1].tolist()
            for row, length, first in zip(found.ids, found.lengths, found.first, strict=True)
            for at in range(first, length)
        ]

    assert scored(limit) == scored(None)[:limit]


def fake_text(name: str, lengths: list[int], first: list[int]) -> TokenWindows:
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(1, length + 1) + 1000 * row
    return TokenWindows(name, ids, torch.tensor(lengths), torch.tensor(first))


@given(st.lists(st.integers(2, 90), min_size=1, max_size=12), st.integers(1, 400))
def test_batches_hold_every_scored_token_once(lengths: list[int], batch_tokens: int) -> None:
    texts = [
        fake_text("a", lengths, [1] * len(lengths)),
        fake_text("b", [50, 7], [20, 3]),
    ]
    batches = make_batches(texts, batch_tokens)
    for index, text in enumerate(texts):
        wanted = sorted(
            int(token)
            for row, length, first in zip(text.ids, text.lengths, text.first, strict=True)
            for token in row[first:length]
        )
        found = torch.cat([batch.targets[batch.text == index] for batch in batches])
        assert sorted(found.tolist()) == wanted
    for batch in batches:
        assert batch.ids.numel() <= batch_tokens or len(batch.ids) == 1
        # The position that predicts a token is the one before it.
        assert torch.equal(batch.ids.flatten()[batch.predicting + 1], batch.targets)


def test_default_window_is_the_context_capped_and_half_of_it_the_stride() -> None:
    assert EvaluationConfig().resolve(512) == (512, 256)
    assert EvaluationConfig().resolve(131072) == (2048, 1024)
    assert EvaluationConfig(window=100, stride=99).resolve(512) == (100, 99)


def test_window_beyond_the_context_is_refused() -> None:
    with pytest.raises(RecipeError, match="window is 1024, but the model's context is 512"):
        EvaluationConfig(window=1024).resolve(512)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 1}, "window is 1; it must be 2 or more"),
        ({"stride": 0}, "stride is 0; it must be 1 or more"),
        ({"window": 64, "stride": 64}, r"stride is 64 with window 64; it must be in 1 \.\. 63"),
        ({"batch_tokens": 0}, "batch_tokens is 0; it must be 1 or more"),
        ({"spill_bytes": 0}, "spill_bytes is 0; it must be 1 or more"),
        ({"dtype": "float8"}, "dtype is 'float8'; it is fp32 or bf16"),
    ],
)
def test_config_refuses(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        EvaluationConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "evaluation text 'x': path is missing; a source of kind 'text' needs it"),
        ({"kind": "self", "path": "a"}, "'x': path is 'a', which a source of kind 'self'"),
        ({"path": "a", "mode": "lines"}, "'x': mode is 'lines'; it is documents or stream"),
        ({"path": "a", "mode": "stream", "cut": True}, "'x': cut is for mode 'documents'"),
        ({"path": "a", "max_documents": 0}, "'x': max_documents is 0; it must be 1 or more"),
        ({"kind": "self", "length": 1}, "'x': length is 1; it must be 2 or more"),
    ],
)
def test_text_config_refuses(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        TextConfig("x", **settings)


def test_two_texts_of_one_name_are_refused() -> None:
    text = TextConfig("x", path="a")
    with pytest.raises(RecipeError, match="two texts are named 'x'; names must differ"):
        EvaluationConfig(texts=(text, text))
