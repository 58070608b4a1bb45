"""Sentencepiece's BPE, as tokenizer.json has it: merges become scores of tokens.

The reader joins the two neighbours whose joint token has the best score. That is what merges say as
long as every way to put a token together is a merge, and the merges of one token follow each other.
Tokenizers that were converted from sentencepiece are so.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compress_exporters.gguf.tokenizer.tokens import BYTE, UNKNOWN, Words, refusal

MARK = "▁"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>\Z")
_CLEANING = ("^ +| +$", " {2,}")


def sentencepiece(stored: Mapping[str, Any], file: Path) -> Words:
    """CheckpointError for what such a tokenizer would do in another way."""
    model = stored["model"]
    vocab: dict[str, int] = model["vocab"]
    space, cleaned = _normalizer(stored, file)
    types = {i: BYTE for text, i in vocab.items() if _BYTE.match(text)}
    if len(types) < 256:
        raise refusal(
            file, f"{256 - len(types)} of the 256 byte tokens are missing", "a token for every byte"
        )
    unknown = vocab.get(model.get("unk_token"))
    if unknown is not None:
        types[unknown] = UNKNOWN
    merges = [_pair(x) for x in model.get("merges") or ()]
    added = {token["content"] for token in stored.get("added_tokens") or ()}
    scores = _scores(vocab, merges, added | {text for text, i in vocab.items() if i in types}, file)
    note = "the tokenizer drops spaces around texts and doubled ones; llama.cpp keeps them"
    return Words(
        "llama",
        "default",
        types=types,
        scores=scores,
        space=space,
        mark=MARK,
        notes=(note,) if cleaned else (),
    )


def _pair(merge: Any) -> tuple[str, str]:
    a, b = merge.split(" ") if isinstance(merge, str) else merge
    return a, b


def _normalizer(stored: Mapping[str, Any], file: Path) -> tuple[bool, bool]:
    """Whether a space is put in front of a text, and whether spaces are dropped."""
    steps, cleaned, space, marked = list(_steps(stored.get("normalizer"))), False, False, False
    for step in steps:
        pattern = step.get("pattern") or {}
        if step.get("type") == "Replace" and pattern.get("Regex") in _CLEANING:
            cleaned = True
        elif step.get("type") == "Prepend" and step.get("prepend") == MARK:
            space = True
        elif (step.get("type"), pattern.get("String"), step.get("content")) == (
            "Replace",
            " ",
            MARK,
        ):
            marked = True
        else:
            raise refusal(file, f"its normalizer has a step {step.get('type')!r}", "none of such")
    cut = stored.get("pre_tokenizer")
    if not marked and cut is not None and cut.get("type") == "Metaspace":
        unsplit = not cut.get("split", True) and cut.get("replacement") == MARK
        marked, space, cut = unsplit, cut.get("prepend_scheme") != "never", None
    elif cut is not None and cut.get("type") == "Split" and _at_spaces(cut):
        cut = None  # no space is left in a text whose spaces are marks
    if not marked or cut is not None:
        raise refusal(file, "it does not write spaces as sentencepiece does", f"{MARK!r} for them")
    return space, cleaned


def _at_spaces(cut: Mapping[str, Any]) -> bool:
    return (cut.get("pattern") or {}).get("String") == " "


def _steps(normalizer: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if normalizer is not None:
        yield from normalizer.get("normalizers") or [normalizer]


def _scores(
    vocab: Mapping[str, int],
    merges: list[tuple[str, str]],
    special: set[str],
    file: Path,
) -> tuple[float, ...]:
    """-rank of a token's first merge; tokens that no merge makes come behind all others.

    special: tokens that are found in a text before anything is joined, or stand for bytes.
    """
    ranks: dict[str, list[int]] = {}
    for rank, (a, b) in enumerate(merges):
        ranks.setdefault(a + b, []).append(rank)
    known = set(merges)
    for text in vocab.keys() - special:
        for cut in range(1, len(text)):
            pair = (text[:cut], text[cut:])
            if pair[0] in vocab and pair[1] in vocab and pair not in known:
                raise refusal(
                    file,
                    f"its merges do not have {pair[0]!r} + {pair[1]!r}, though {text!r} is a token",
                    "every way to put a token together",
                )
    last = -1
    for text, places in ranks.items():  # in order of the first
        if places[0] < last or places[-1] - places[0] != len(places) - 1:
            raise refusal(file, f"the merges that make {text!r} are apart", "a score a token")
        last = places[-1]
    found = [-float(len(merges))] * (max(vocab.values()) + 1)
    for text, places in ranks.items():
        found[vocab[text]] = -float(places[0])
    return tuple(found)
