"""The report as the end of a terminal's output."""
