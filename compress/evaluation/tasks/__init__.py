"""Tasks with right answers: of several choices, a last word, or to be generated."""
