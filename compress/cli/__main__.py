"""`python -m compress.cli`."""

from compress.cli.main import entry

entry()
