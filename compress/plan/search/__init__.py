"""Sizes that a budget leaves open: which there are, what each takes, and what was measured."""
