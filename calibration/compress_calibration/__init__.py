"""Calibration: where the tokens come from, how they are cut into rows, and what is kept of them."""
