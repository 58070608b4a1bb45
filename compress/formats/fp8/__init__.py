"""Block FP8."""
