"""This machine: its processor, memory and packages, as far as a run depends on them."""
