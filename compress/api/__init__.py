"""The verbs as Python has them: progress bars, models in memory, errors in its own words."""
