"""Facts of `roofline` and `bench` as tables for a terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from compress.report.terminal.cells import COLUMNS
from compress.report.units import MISSING, counted, size, times, trimmed

_INDENT = 4
_PARTS = {
    "products": "products",
    "head": "output head",
    "attention": "attention",
    "between": "between products",
    "host": "planning",
}


def speed_table(facts: dict[str, Any]) -> str:
    """What is expected of a checkpoint, and of its source where that is given; what was measured
    where it was."""
    lines = [_machine(facts["machine"])]
    if "disturbed" in facts:
        lines.append(f"note: {facts['disturbed']}")
    if "measured" in facts:
        lines += ["", *_measured(facts)]
    free = facts["machine"]["free_bytes"]
    lines += ["", *_model(facts["checkpoint"], free)]
    if "source" in facts:
        lines += ["", *_model(facts["source"], free), "", *_compared(facts)]
    return "\n".join(lines)


def _machine(here: dict[str, Any]) -> str:
    rates = [_number(here[f"giga{unit}_per_second"]) for unit in ("bytes", "flops")]
    threads = counted(here["threads"], "thread")
    speed = f"{rates[0]} GB/s, {rates[1]} GFLOP/s"
    kept = f", keys and values in {here['kv_dtype']}" if here["kv_dtype"] != here["dtype"] else ""
    return f"{here['processor']}, {threads}, {here['dtype']}{kept}: {speed}"


def _model(model: dict[str, Any], free: int | None) -> Iterator[str]:
    yield model["path"]
    if "not_predicted" in model:
        yield f"  nothing is predicted: {model['not_predicted']}"
        return
    for name, text in _summary(model):
        yield f"  {name:<15} {text}"
    yield ""
    length = model["steps"][0]["length"]
    yield f"  from token to token, each text {length} long, expected and at best:"
    yield from _aligned([_STEP_TITLES, *map(_step, model["steps"])])
    yield ""
    yield "  what is left of it above the best, in ms, by where it is:"
    yield from _aligned([("batch", *_LEFT.values()), *map(_left, model["steps"])])
    for step in model["steps"]:
        if free is not None and step["memory_bytes"] > free:
            needed = f"{size(step['memory_bytes'])} of memory, {size(free)} are free"
            yield f"  batch {step['batch']} cannot run here: it needs {needed}"


def _summary(model: dict[str, Any]) -> Iterator[tuple[str, str]]:
    stored = ", ".join(f"{size(count)} {name}" for name, count in model["stored_bytes"].items())
    rounded = "" if model["math"] == "exact" else f", codes by {model['math']}"
    yield "weights", f"{size(model['weight_bytes'])} in memory; products{rounded}: {stored}"
    texts, tokens = counted(model["cache_texts"], "text"), counted(model["cache_tokens"], "token")
    whole = ", ".join(f"{size(n)} of {count}" for count, n in model["kv_bytes_of_text"].items())
    each = f"{size(model['kv_bytes_per_token'])} a token, a text {whole}"
    yield "cache", f"{each}; room for {tokens}, {texts}"
    first, bound = model["first_token"], model["compute_bound_batch"]
    times = f"{_number(first['expected_ms'])} ms, {_number(first['at_best_ms'])} at best"
    yield "first token", f"{times}, behind a prompt of {first['prompt']}"
    yield "compute bound", "never" if bound is None else f"from batch {_number(bound)} on, at best"
    yield "best batch", str(model["best_batch"])


_STEP_TITLES = (
    "batch", "ms", "at best", "tokens/s", "at best", "ops/byte", "memory", "most of it",
)  # fmt: skip


def _step(step: dict[str, Any]) -> tuple[str, ...]:
    most = max(step["parts_ms"], key=step["parts_ms"].__getitem__)
    share = step["parts_ms"][most] / step["expected_ms"]
    return (
        str(step["batch"]),
        _number(step["expected_ms"]),
        _number(step["at_best_ms"]),
        _number(step["tokens_per_second"]),
        _number(step["at_best_tokens_per_second"]),
        _number(step["operations_per_byte"]),
        size(step["memory_bytes"]),
        f"{_PARTS[most]} {share:.0%}",
    )


_LEFT = {
    "weights": "weights",
    "compute": "compute",
    "cache": "cache",
    "between": "between products",
    "outside": "outside",
}


def _left(step: dict[str, Any]) -> tuple[str, ...]:
    return (str(step["batch"]), *(_number(step["left_ms"][name]) for name in _LEFT))


def _compared(facts: dict[str, Any]) -> Iterator[str]:
    """How much faster than its source; below 1 it is slower."""
    yield "  tokens/s of the checkpoint over those of its source, expected and at best:"
    rows = []
    for own, other in zip(facts["checkpoint"]["steps"], facts["source"]["steps"], strict=True):
        keys = ("tokens_per_second", "at_best_tokens_per_second")
        rows.append((str(own["batch"]), *(times(own[key] / other[key]) for key in keys)))
    yield from _aligned([("batch", "expected", "at best"), *rows])


_MEASURED = {
    "tokens_per_second": "tokens/s",
    "first_token_p50_ms": "first p50",
    "first_token_p99_ms": "first p99",
    "between_tokens_p50_ms": "next p50",
    "between_tokens_p99_ms": "next p99",
}


def _by_math(facts: dict[str, Any]) -> Iterator[str]:
    """A line a math."""
    found: dict[str, list[str]] = {}
    for row in facts["maths"]:
        share = "" if row["of_bandwidth"] is None else f"({row['of_bandwidth']:.0%})"
        found.setdefault(row["math"], []).extend((_number(row["tokens_per_second"]), share))
    batches = [counted(each["batch"], "text") for each in facts["measured"]]
    yield "  tokens/s by math (of the bandwidth, that a step's weights take):"
    titles = [title for batch in batches for title in (batch, "")]
    yield from _aligned([("math", *titles), *((math, *cells) for math, cells in found.items())])


def _held(facts: dict[str, Any]) -> Iterator[str]:
    """What the cache's allocator gave out, where it is our engine's."""
    for found in facts["measured"]:
        held = found.get("cache_bytes")
        if held is not None:
            expected = "" if held["expected"] is None else f" ({size(held['expected'])})"
            texts = counted(found["batch"], "text")
            yield f"  cache of {texts}: {size(held['measured'])}{expected} in blocks at once"


def _measured(facts: dict[str, Any]) -> Iterator[str]:
    texts = facts["texts"]
    sizes = f"{texts['prompt']} + {texts['output']}"
    yield f"  measured on texts of {sizes} tokens that come at once, in ms (expected):"
    rows = []
    for found in facts["measured"]:
        row = [str(found["batch"])]
        for name in _MEASURED:
            row += [_number(found[name]["measured"]), f"({_number(found[name]['expected'])})"]
        rows.append(tuple(row))
    titles = [title for name in _MEASURED.values() for title in (name, "")]
    yield from _aligned([("batch", *titles), *rows])
    yield from _by_math(facts)
    yield from _held(facts)
    for batch, seconds in facts["left_out"].items():
        remedy = f"--batch {batch} asks for it"
        yield f"  batch {batch} is left out, as it would take about {seconds:.0f} s; {remedy}"
    for line in facts["checkpoint"].get("notices", ()):
        yield f"  note: {line}"


def _number(value: float | None) -> str:
    return MISSING if value is None else trimmed(value)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns that end at one place; those that a terminal has no room for follow below, behind the
    first column again. A column without a title stays beside the one before."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    parts, room = [[0]], COLUMNS - _INDENT - widths[0]
    for group in _together(rows[0]):
        taken = sum(widths[i] + 2 for i in group)
        if taken > room and len(parts[-1]) > 1:
            parts, room = [*parts, [0]], COLUMNS - _INDENT - widths[0]
        parts[-1] += group
        room -= taken
    return [
        (" " * _INDENT + "  ".join(row[i].rjust(widths[i]) for i in part)).rstrip()
        for part in parts
        for row in rows
    ]


def _together(titles: Sequence[str]) -> Iterator[list[int]]:
    """Places of the columns behind the first, each with those that have no title."""
    group: list[int] = []
    for i, title in enumerate(titles[1:], 1):
        if title and group:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
