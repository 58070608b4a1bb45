"""A plan as a notebook shows it."""
