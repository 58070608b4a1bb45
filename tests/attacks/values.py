"""Odd values: numbers, words, patterns, and changes of JSON."""

import copy
from random import Random
from typing import Any

from helpers.mutations import KEYS, WORDS

NUMBERS = (
    *("0", "-1", "-0", "1", "2", "7", "100000", "100000000", str(10**20), str(2**31), str(2**63)),
    *(str(2**64), str(-(2**63)), "1e3", "1e400", "-1e400", "1e-400", "nan", "-nan", "inf", "-inf"),
    *("", " ", "0x10", "1_000", "1,000", "½", "٣", "1.5", ".5", "5.", "+5", "--5", "1e", "true"),
    *("None", "null", "NaN\n", " 4 ", "4\t", "9" * 400, "9" * 5000, "-" + "9" * 30, "1;2", "[1]"),
)
TEXTS = (
    *("", " ", "\n", "\t", "a\nb", "a\r\nb", "a\x1b[31mb", "\x7f", "\ufeffx", "\u202eabc", "é"),
    *("\udcff", "a\udc80b", "日本", "🙂", "x" * 256, "x" * 5000, "-", "--", "-x", "~", "~root"),
    *("$HOME", "%s%n", "{x}", "{0}", "{", "*", "?", "[", "[a", "null", "None", "true", "0", "nan"),
    *(".", "..", "/", "//", "../..", "/dev/null", "/dev/zero", "/proc/self/mem", "/root", "a/b/c"),
    *("C:\\x", "file:///x", "http://x/y", "owner/name", "a:b", "a=b", "=", "[]", "{}", "'", '"'),
)
PATTERNS = (
    *("re:(.*)*x", "re:(.|.)*z", r"re:(\w+\.?)+!", "re:(a|aa)+$", "re:(.*.*)*=", r"re:(\d+)*\."),
    *("re:(.+)+x", r"re:^(([a-z])+.)+[A-Z]([a-z])+$", "re:(x+x+)+y", r"re:([\w.]*)*\1\1!"),
    *("re:", "re:(", "re:[", "re:*", "re:a{99999999999}", "re:(?P<a>x)(?P<a>y)", r"re:\8"),
    *("re:(?i)MODEL.*", "re:.*", "re:.", "re:(?=x)", "re:" + "(" * 200 + ")" * 200),
    *("re:" + "a?" * 40 + "a" * 40, "re:" + "(" * 5000, "re:x" * 3000, "*" * 60 + "q"),
    *("", "*", "**", "*.*.*", "?", "[", "[!", "[z-a]", "q_proj", "*q_proj", "no_such", "\udcff"),
    *("model.layers.99.*", "lm_head", "router", "embedding", "re:lm_head", "Q_PROJ", " q_proj "),
)
DEEP = 3000  # levels; Python's own limit of recursion is 1000


def deep(opening: str = "[", closing: str = "]", levels: int = DEEP) -> str:
    return opening * levels + closing * levels


ODD: tuple[Any, ...] = (
    *(None, True, False, "", "4", "x", 0, 1, -1, 2, 3, 0.5, -0.0, 10**12, 10**30, 1 << 63),
    *(-(2**70), float("nan"), float("inf"), [], {}, [[]], [5], [None], {"x": 1}, ["re:("]),
    *({"a": {"b": {}}}, "x" * 3000, "\ud800", "a\nb", [1] * 2000, "/dev/zero", "é" * 300),
)


def mutate(rng: Random, value: Any, often: str = "") -> Any:
    """A copy of a JSON value with one change somewhere, mostly below the key `often`."""
    changed = copy.deepcopy(value)
    found = list(_places(changed))
    near = [path for path in found if often in path]
    found = near if near and rng.random() < 0.7 else found
    if not found:
        return rng.choice(ODD)
    *path, last = rng.choice(found)
    holder = changed
    for key in path:
        holder = holder[key]
    kind = rng.choice(["odd", "odd", "near", "near", "drop", "name", "add"])
    if kind == "odd":
        holder[last] = copy.deepcopy(rng.choice(ODD))
    elif kind == "near" or not isinstance(holder, dict):
        holder[last] = _near(rng, holder[last])
    elif kind == "drop":
        del holder[last]
    else:
        holder[rng.choice(KEYS)] = holder.pop(last) if kind == "name" else rng.choice(ODD)
    return changed


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else []
    inside = enumerate(value) if isinstance(value, list) else inside
    return [p for key, below in inside for p in [(*at, key), *_places(below, (*at, key))]]


def _near(rng: Random, value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return rng.choice([value + 1, value - 1, 2 * value, value // 2, -value, 0, value * 10**9])
    if isinstance(value, str):
        return rng.choice([value.upper(), value + "x", value[:-1], value * 300, *WORDS])
    if isinstance(value, list):
        return rng.choice([[*value, *value[:1]], value[1:], value * 500])
    return {str(key).upper(): inner for key, inner in value.items()}


def garble(rng: Random, raw: bytes) -> bytes:
    """Bytes cut, changed, put in, doubled, or all of them gone."""
    at, to = rng.randrange(len(raw) + 1), rng.randrange(len(raw) + 1)
    odd = rng.choice(
        [b"\0", b"\xff\xfe", b"\x80", b"{", b"}", b'"', b"[" * 500, b"\n", b" " * 9999]
    )
    return rng.choice(
        [
            *(b"", raw[:at], raw[at:], raw[:at] + odd + raw[at:], raw[:at] + odd + raw[at + 1 :]),
            *(raw + raw, raw[: min(at, to)] + raw[max(at, to) :], raw[::-1], b"\xef\xbb\xbf" + raw),
            *(raw.decode("latin-1").encode("utf-16"), odd * 50, raw + odd, raw.replace(b":", b"=")),
        ]
    )
