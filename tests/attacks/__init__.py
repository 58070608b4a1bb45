"""Attacks on every command: arguments, files and surroundings that go wrong, drawn from a seed.

`cases` draws a case, `zygote` runs it, `judge` says what it did that no command may do. To see one
again: `python -m attacks.again SEED`, in `tests/`.
"""
