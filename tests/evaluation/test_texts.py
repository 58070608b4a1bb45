"""From files to windows: BOS, documents, streams, refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.errors import DataError
from compress.evaluation.texts import own_rows, read_windows
from compress.evaluation.windows import TokenWindows
from compress.recipe.evaluation_config import EvaluationConfig, TextConfig
from compress.text.tokenizer import Tokenizer, load_tokenizer
from helpers.tiny_models import write_tokenizer

DOCUMENTS = ("once upon a time", "the old cat sat by the door", "a girl found a red stone")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(DOCUMENTS))
    return str(path)


def rows(windows: TokenWindows) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(windows.ids, windows.lengths, strict=True)]


def test_documents_start_with_bos_each(tokenizer: Tokenizer, file: str) -> None:
    windows = read_windows(TextConfig("t", path=file), EvaluationConfig(), tokenizer, 128)
    assert rows(windows) == [[0, *tokenizer.encode(text)] for text in DOCUMENTS]
    assert windows.scored == sum(len(tokenizer.encode(text)) for text in DOCUMENTS)
    assert windows.settings == {
        "mode": "documents",
        "window": 128,
        "stride": 64,
        "bos": "<|endoftext|>",
        "documents": 3,
    }


def test_a_stream_starts_with_bos_once(tokenizer: Tokenizer, file: str) -> None:
    text = TextConfig("t", path=file, mode="stream")
    windows = read_windows(text, EvaluationConfig(), tokenizer, 128)
    assert rows(windows) == [[0, *(i for text in DOCUMENTS for i in tokenizer.encode(text))]]


@pytest.mark.parametrize(("bos", "stated"), [(False, "off"), (True, "<|endoftext|>")])
def test_bos_is_stated(tokenizer: Tokenizer, file: str, bos: bool, stated: str) -> None:
    text = TextConfig("t", path=file, max_documents=1)
    windows = read_windows(text, EvaluationConfig(bos=bos), tokenizer, 128)
    assert windows.settings["bos"] == stated
    assert (windows.ids[0, 0] == 0) == bos
    # Without BOS the first token has nothing before it.
    assert windows.scored == len(tokenizer.encode(DOCUMENTS[0])) - (not bos)


def test_a_tokenizer_without_bos_is_stated(tmp_path: Path, file: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null}')
    text = TextConfig("t", path=file, cut=True, max_tokens=5)
    windows = read_windows(text, EvaluationConfig(), load_tokenizer(tmp_path), 128)
    assert windows.settings["bos"] == "none"
    assert windows.settings["cut"] is True
    assert windows.settings["max_tokens"] == 5


def test_self_text_keeps_the_bos_it_was_started_with(tokenizer: Tokenizer) -> None:
    asked: list[tuple[int, int, int]] = []

    def generate(count: int, length: int, seed: int) -> torch.Tensor:
        asked.append((count, length, seed))
        return torch.tensor([[0, 5, 6], [7, 8, 9]])

    text = TextConfig("own", kind="self", samples=2, length=3, seed=4)
    windows = read_windows(text, EvaluationConfig(), tokenizer, 128, generate)
    assert asked == [(2, 3, 4)]
    assert rows(windows) == [[0, 5, 6], [0, 7, 8, 9]]
    assert windows.settings["sampled_with_seed"] == 4


@pytest.mark.parametrize("mode", ["documents", "cut", "stream"])
@pytest.mark.parametrize("bos", [True, False])
def test_max_tokens_reads_no_further_and_changes_no_context(
    tokenizer: Tokenizer, tmp_path: Path, mode: str, bos: bool
) -> None:
    path = tmp_path / "many.txt"
    path.write_text("<|endoftext|>".join(" ".join(DOCUMENTS[: 1 + i % 3]) for i in range(40)))
    config = EvaluationConfig(window=8, stride=3, bos=bos)
    how = {"mode": "stream" if mode == "stream" else "documents", "cut": mode == "cut"}
    read: list[str] = []

    def encode_many(texts: list[str]) -> list[list[int]]:
        read.extend(texts)
        return tokenizer.encode_batch(texts)

    counting = replace(tokenizer, encode_many=encode_many)
    everything = read_windows(TextConfig("t", path=str(path), **how), config, counting, 128)
    for limit in (1, 7, 8, 20, 50, 10_000):
        read.clear()
        text = TextConfig("t", path=str(path), max_tokens=limit, **how)
        found = read_windows(text, config, counting, 128)
        assert found.scored == min(limit, everything.scored)
        whole = rows(everything)[: len(found.lengths)]
        last = rows(found)[-1]
        assert [*rows(found)[:-1], whole[-1][: len(last)]] == [*whole[:-1], last]
        assert torch.equal(found.first, everything.first[: len(found.lengths)])
        assert len(read) == 40 or len(read) <= 2 + limit + 8
        assert found.settings["documents"] == (1 if mode == "stream" else len(read))


@pytest.mark.parametrize("mode", ["documents", "cut", "stream"])
def test_the_model_writes_no_more_rows_than_max_tokens_asks_for(
    tokenizer: Tokenizer, mode: str
) -> None:
    how = {"mode": "stream" if mode == "stream" else "documents", "cut": mode == "cut"}
    asked: list[int] = []

    def generate(count: int, length: int, seed: int) -> torch.Tensor:
        asked.append(count)
        return torch.arange(1, 1 + 32 * 16).reshape(32, 16)[:count, :length]

    def read(limit: int | None) -> TokenWindows:
        text = TextConfig("own", kind="self", length=16, max_tokens=limit, **how)
        return read_windows(text, EvaluationConfig(window=8, stride=3), tokenizer, 128, generate)

    everything = read(None)
    for limit in (1, 7, 15, 16, 40, 10_000):
        found = read(limit)
        assert rows(found)[:-1] == rows(everything)[: len(found.lengths) - 1]
        assert found.scored == min(limit, everything.scored)
        assert asked[-1] == 32 or asked[-1] <= 2 + limit // 7
    assert asked[:2] == [32, 1]


def test_max_documents_are_rows_of_self_text(tokenizer: Tokenizer) -> None:
    text = TextConfig("own", kind="self", samples=5, length=4, max_documents=2)
    assert own_rows(text, 128) == 2


def test_self_text_needs_a_model(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="'own' is sampled from the source model, which is not"):
        read_windows(TextConfig("own", kind="self"), EvaluationConfig(), tokenizer, 128)


def test_missing_and_empty_files_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        read_windows(TextConfig("t", path="no.txt"), EvaluationConfig(), tokenizer, 128)
    (tmp_path / "empty.txt").write_text(" \n")
    text = TextConfig("t", path=str(tmp_path / "empty.txt"))
    with pytest.raises(DataError, match="'t' holds no token to score; give a longer text"):
        read_windows(text, EvaluationConfig(), tokenizer, 128)
