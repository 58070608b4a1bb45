"""Requests in, results out: what is refused, who goes next, one step after the other."""
