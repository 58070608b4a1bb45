"""A comparison in the terminal: plain text, 80 columns."""

from pathlib import Path

from compress.report import units
from compress.report.comparison.records import Comparison, Contender
from compress.report.comparison.words import measured, title, verdict
from compress.report.terminal.cells import COLUMNS, clean, cut, pad, wrap

_WIDTHS = (20, 9, 9, 9, 9, 10, 10)  # behind a mark of two cells
_TITLES = ("", "size", "KL", "ppl", "agree", "KV/token", "tokens/s")


def render_comparison(found: Comparison, page: str | Path | None = None) -> str:
    """The table, who is not in it and why, the winner and the line that makes it."""
    lines = [cut(f"{clean(title(found))}: {units.counted(len(found.contenders), 'result')}"), ""]
    if found.contenders:
        lines += [_row("", _TITLES), "-" * COLUMNS]
        lines += [_row(_mark(found, one), _cells(one)) for one in found.contenders]
        lines += ["", *wrap(f"* on the front of size and KL. {measured(found)}", COLUMNS)]
        lines += wrap(_speed(found), COLUMNS)
    for left in found.left_out:
        lines += ["", *wrap(clean(f"Not compared: {left.name}: {left.reason}"), COLUMNS)]
    said = verdict(found)
    lines += ["", *wrap(said, COLUMNS)] if said else []
    if found.best is not None and found.best.command:
        lines += ["", "To make it again", f"  {found.best.command}"]
    if found.best is not None:
        lines += ["", "It is in", f"  {found.best.path}"]
    if page is not None:
        lines += ["", "Page", f"  {page}"]
    return "\n".join(lines) + "\n"


def _mark(found: Comparison, one: Contender) -> str:
    return f"{'>' if one.name == found.winner else ' '}{'*' if one.on_kl_front else ' '}"


def _row(mark: str, cells: tuple[str, ...]) -> str:
    name, *numbers = cells
    first = pad(cut(clean(name), _WIDTHS[0] - 1), _WIDTHS[0])
    rest = (pad(text, width, left=False) for text, width in zip(numbers, _WIDTHS[1:], strict=True))
    return f"{mark or '  '} {first}{''.join(rest)}".rstrip()


def _cells(one: Contender) -> tuple[str, ...]:
    kv, speed = one.kv_bytes_per_token, one.tokens_per_second
    return (
        one.name,
        units.size(one.bytes),
        units.significant(one.kl, 3),
        units.significant(one.perplexity, 4),
        units.percent(one.top1_agreement),
        units.MISSING if kv is None else units.size(kv),
        units.MISSING if speed is None else units.significant(speed, 3),
    )


def _speed(found: Comparison) -> str:
    if found.speed_reason is not None:
        return f"No tokens a second: {found.speed_reason}."
    speed = found.measured.tokens_per_second
    source = "" if speed is None else f"; the source {units.significant(speed, 3)}"
    return f"Tokens a second are predicted, for one text in this engine on this machine{source}."
