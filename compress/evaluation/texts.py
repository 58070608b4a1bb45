"""From a text's config to its windows: read, tokenize, put BOS in front, cut."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from compress.errors import DataError
from compress.evaluation.windows import TokenWindows, WindowRule, cut_windows
from compress.recipe.evaluation_config import EvaluationConfig, TextConfig
from compress.text.tokenizer import Tokenizer
from compress_calibration.sources import documents

# (count, length, seed) -> ids int64 [count, length] that the source model wrote.
Generate = Callable[[int, int, int], Tensor]


def read_windows(
    text: TextConfig,
    config: EvaluationConfig,
    tokenizer: Tokenizer | None,
    context: int,
    generate: Generate | None = None,
) -> TokenWindows:
    """Windows of one text for a model of that context length.

    generate: needed for texts of kind "self" only, which in turn need no tokenizer.
    Raises DataError for text that cannot be read or holds no token to score, RecipeError when
    window or stride do not fit the model.
    """
    window, stride = config.resolve(context)
    bos = tokenizer.bos_id if tokenizer is not None and config.bos else None
    sequences = list(_needed(_sequences(text, window, tokenizer, bos, generate), text, window))
    rule = WindowRule(window, stride, text.cut, text.max_tokens)
    settings = _settings(text, rule, _bos_name(tokenizer, config.bos), sequences)
    windows = cut_windows(text.name, sequences, rule, settings)
    if windows.scored == 0:
        raise DataError(
            f"evaluation text {text.name!r} holds no token to score; give a longer text"
        )
    return windows


def _needed(sequences: Iterator[list[int]], text: TextConfig, window: int) -> Iterator[list[int]]:
    """As many of the sequences as hold `max_tokens` that are scored; all without a limit. What lies
    behind is neither read nor tokenized."""
    scored = 0
    for ids in sequences:
        yield ids
        scored += max(0, min(len(ids), window if text.cut else len(ids)) - 1)
        if text.max_tokens is not None and scored >= text.max_tokens:
            return


def _sequences(
    text: TextConfig,
    window: int,
    tokenizer: Tokenizer | None,
    bos: int | None,
    generate: Generate | None,
) -> Iterator[list[int]]:
    """Token ids of every document (or of the one stream), BOS in front where there is one."""
    pieces = _pieces(text, window, tokenizer, generate)
    if text.mode == "stream":
        pieces = iter([_stream(pieces, text)])
    for ids in pieces:
        # Text the model wrote may start with the BOS it was started with.
        yield ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _stream(pieces: Iterator[list[int]], text: TextConfig) -> list[int]:
    """The documents joined, as many as hold `max_tokens` behind the first token."""
    ids: list[int] = []
    for piece in pieces:
        ids += piece
        if text.max_tokens is not None and len(ids) > text.max_tokens:
            break
    return ids


def _pieces(
    text: TextConfig, window: int, tokenizer: Tokenizer | None, generate: Generate | None
) -> Iterator[list[int]]:
    if text.kind == "self":
        if generate is None:
            raise DataError(
                f"evaluation text {text.name!r} is sampled from the source model, which is not"
                " at hand; give the source, or a text file"
            )
        yield from generate(own_rows(text, window), text.length, text.seed).tolist()
        return
    assert tokenizer is not None, "only text of the model's own does without a tokenizer"
    for document in islice(documents(text.source(), tokenizer), text.max_documents):
        yield tokenizer.encode(document)


def own_rows(text: TextConfig, window: int) -> int:
    """Rows that the model writes: no more than `max_tokens` and `max_documents` ask for."""
    rows = min(text.samples, text.max_documents or text.samples)
    if text.max_tokens is None:
        return rows
    # The first token of a row, or of a stream, is not scored.
    scored = (min(text.length, window) if text.cut else text.length) - 1
    return min(rows, -(-text.max_tokens // scored))


def _bos_name(tokenizer: Tokenizer | None, wanted: bool) -> str:
    """The BOS as text, or why there is none."""
    if not wanted:
        return "off"
    if tokenizer is None or tokenizer.bos_id is None:
        return "none"
    return tokenizer.decode([tokenizer.bos_id])


def _settings(
    text: TextConfig, rule: WindowRule, bos: str, sequences: Sequence[Sequence[int]]
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "mode": text.mode,
        "window": rule.window,
        "stride": rule.stride,
        "bos": bos,
        "documents": len(sequences),
    }
    if text.cut:
        settings["cut"] = True
        del settings["stride"]
    if text.max_tokens is not None:
        settings["max_tokens"] = text.max_tokens
    if text.kind == "self":
        settings["sampled_with_seed"] = text.seed
        settings["sampled_length"] = text.length
    return settings
