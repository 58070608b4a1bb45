"""The report: one JSON file, and the page and the terminal table drawn from it alone."""
