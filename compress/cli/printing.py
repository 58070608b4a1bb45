"""What goes to people: on a terminal no wider than it, elsewhere a fact a line, to be searched."""

import shutil
import sys

import click

from compress.report.columns import fitted

_LEAST = 40  # a narrower terminal breaks lines by itself


def show(text: str) -> None:
    """A table or a list on stdout."""
    click.echo(fitted(text, _columns()) if sys.stdout.isatty() else text)


def complain(text: str) -> None:
    """A line on stderr."""
    click.echo(fitted(text, _columns()) if sys.stderr.isatty() else text, err=True)


def _columns() -> int:
    """Cells of a line of the terminal; 80 where it does not say."""
    return max(shutil.get_terminal_size().columns, _LEAST)
