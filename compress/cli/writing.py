"""Text on the terminal, or in a pipe, as it comes."""

import os
import sys
from collections.abc import Iterable

import click

from compress.cli.printing import complain


def write(text: str) -> None:
    """At once. Ends the command quietly where nobody reads on.

    Characters that the terminal's encoding does not have become question marks.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        click.echo(text.encode(encoding, "replace").decode(encoding), nl=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer goes nowhere, without another complaint at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(1) from None


def write_pieces(pieces: Iterable[str]) -> None:
    """Pieces of a text, and the end of its line, also where Ctrl-C ends it."""
    last = "\n"
    try:
        for piece in pieces:
            write(piece)
            last = piece[-1:] or last
    finally:
        if last != "\n":
            write("\n")


def note(text: str) -> None:
    """A line beside the output."""
    complain(f"note: {text}")
