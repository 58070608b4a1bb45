"""A comparison in the terminal: plain text, 80 columns."""

from pathlib import Path

from compress.report import units
from compress.report.comparison.records import Comparison, Contender
from compress.report.comparison.words import measured, of_files, title, verdict
from compress.report.terminal.cells import COLUMNS, clean, cut, pad, wrap
from compress.report.terminal.copied import indented

_NAME = 23  # cells, where reasons stand beside
_WIDTHS = (20, 9, 9, 9, 9, 10, 10)  # behind a mark of two cells
_TITLES = ("", "size", "KL", "ppl", "agree", "KV/token", "tokens/s")


def render_comparison(found: Comparison, page: str | Path | None = None) -> str:
    """The table, who is not in it and why, the winner and the line that makes it."""
    lines = [cut(f"{clean(title(found))}: {units.counted(len(found.contenders), 'result')}"), ""]
    if found.contenders:
        lines += [_row("", _TITLES), "-" * COLUMNS]
        lines += [_row(_mark(found, one), _cells(one)) for one in found.contenders]
        under = ("* on the front of size and KL.", measured(found), of_files(found), _speed(found))
        lines += ["", *wrap(" ".join(filter(None, under)), COLUMNS)]
    lines += _left_out(found)
    said = verdict(found)
    lines += ["", *wrap(said, COLUMNS)] if said else []
    if found.best is not None:
        lines += _best(found.best)
    if page is not None:
        lines += ["", "Page", f"  {page}"]
    return "\n".join(lines) + "\n"


def _left_out(found: Comparison) -> list[str]:
    """Names, with the reasons beside them."""
    if not found.left_out:
        return []
    lines = ["", "Not compared"]
    for left in found.left_out:
        name = f"  {pad(cut(clean(left.name), _NAME - 3), _NAME - 2)}"
        first, *more = wrap(clean(left.reason), COLUMNS - _NAME)
        lines += [f"{name}{first}", *(f"{' ' * _NAME}{line}" for line in more)]
    return lines


def _best(one: Contender) -> list[str]:
    """Where it is, what starts it, and how it is made again."""
    lines = ["", "It is in", f"  {one.path}"]
    lines += ["", "Start it", *indented(one.open_with)] if one.open_with else []
    return lines + (["", "Make it again", f"  {one.command}"] if one.command else [])


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
