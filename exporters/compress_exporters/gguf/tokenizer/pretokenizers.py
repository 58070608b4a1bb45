"""How a text is cut before byte-level BPE: tokenizer.json's words, and llama.cpp's name for each.

llama.cpp knows cuts by a name alone and has their patterns in its code. A fine-tuned tokenizer
keeps the cut of its base, so it is found by pattern, not by what it makes of a sample.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
QWEN2 = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_CASES = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_FRONT = r"[^\r\n\p{L}\p{N}]?"
GPT4O = (
    rf"{_FRONT}{_CASES[0]}*{_CASES[1]}+{_WORDS}?|{_FRONT}{_CASES[0]}+{_CASES[1]}*{_WORDS}?"
    rf"|\p{{N}}{{1,3}}|{_SLASHES}"
)
TEKKEN = rf"{_FRONT}{_CASES[0]}*{_CASES[1]}+|{_FRONT}{_CASES[0]}+{_CASES[1]}*|\p{{N}}|{_SLASHES}"
DIGITS = "one digit at a time"

# (cuts, whether a whole word that is a token is never taken apart) -> tokenizer.ggml.pre.
NAMES: Mapping[tuple[tuple[str, ...], bool], str] = MappingProxyType(
    {
        ((GPT2,), False): "gpt-2",
        ((DIGITS, GPT2), False): "smollm",
        ((LLAMA3,), True): "llama-bpe",
        ((LLAMA3,), False): "smaug-bpe",
        ((QWEN2,), False): "qwen2",
        ((GPT4O,), False): "gpt-4o",
        ((TEKKEN,), True): "tekken",
    }
)
# Names whose code in llama.cpp tells capital letters by ASCII alone.
BY_ASCII = ("gpt-4o", "tekken")


def cuts_of(pre_tokenizer: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """The cuts of a byte-level pre_tokenizer, in order; None for anything else."""
    steps = _steps(pre_tokenizer)
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    cuts = [_cut(step) for step in steps[:-1]]
    if steps[-1].get("use_regex", True):
        cuts.append(GPT2)
    known = tuple(x for x in cuts if x is not None)
    return known if len(known) == len(cuts) else None


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer.get("type") == "Sequence":
        return list(pre_tokenizer.get("pretokenizers", ()))
    return [pre_tokenizer]


def _cut(step: Mapping[str, Any]) -> str | None:
    if step.get("type") == "Digits" and step.get("individual_digits"):
        return DIGITS
    pattern = step.get("pattern")
    whole = step.get("behavior") == "Isolated" and not step.get("invert")
    if step.get("type") == "Split" and whole and isinstance(pattern, Mapping):
        return pattern.get("Regex")
    return None
