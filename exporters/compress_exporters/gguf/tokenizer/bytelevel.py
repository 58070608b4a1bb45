"""Byte-level BPE: tokens and merges as they are, and the name of the way texts are cut."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress_exporters.gguf.tokenizer.pretokenizers import BY_ASCII, NAMES, cuts_of
from compress_exporters.gguf.tokenizer.tokens import Words, refusal

_SPACE = chr(ord(" ") + 256)  # how byte-level tokens write a space


def bytelevel(stored: Mapping[str, Any], file: Path) -> Words:
    """CheckpointError for cuts and normalizers that GGUF's readers do not know."""
    model = stored["model"]
    cuts = cuts_of(stored.get("pre_tokenizer"))
    name = None if cuts is None else NAMES.get((cuts, bool(model.get("ignore_merges"))))
    if name is None:
        raise refusal(
            file,
            f"llama.cpp has no name for how its pre_tokenizer cuts texts ({_shown(cuts)})",
            f"the cuts of {', '.join(dict.fromkeys(NAMES.values()))}",
        )
    return Words("gpt2", name, merges=_merges(model), notes=_notes(stored, name, file))


def _shown(cuts: tuple[str, ...] | None) -> str:
    return "it is not byte-level" if cuts is None else " then ".join(cuts)[:100]


def _merges(model: Mapping[str, Any]) -> tuple[str, ...]:
    """As "a b": newer files have pairs."""
    pairs = (x.split(" ") if isinstance(x, str) else x for x in model.get("merges") or ())
    return tuple(" ".join(part.replace(" ", _SPACE) for part in pair) for pair in pairs)


def _notes(stored: Mapping[str, Any], name: str, file: Path) -> tuple[str, ...]:
    notes = []
    if name in BY_ASCII:
        notes.append(
            f"llama.cpp cuts as {name} but for words with capital letters that are not ASCII"
        )
    normalizer = stored.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise refusal(file, f"it changes texts first ({normalizer.get('type')})", "NFC at most")
    if normalizer is not None:
        notes.append("the tokenizer brings texts into Unicode's form NFC first; llama.cpp does not")
    return tuple(notes)
