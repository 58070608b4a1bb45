"""From files to windows: BOS, documents, streams, refusals."""

from pathlib import Path

import pytest
import torch

from compress.errors import DataError
from compress.evaluation.config import EvaluationConfig, TextConfig
from compress.evaluation.texts import read_windows
from compress.evaluation.windows import TokenWindows
from compress_calibration.tokenizer import Tokenizer, load_tokenizer
from tiny_models import write_tokenizer

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
