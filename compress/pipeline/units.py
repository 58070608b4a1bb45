"""Units of a run that are not blocks: what the journal calls them."""

OUTSIDE = "outside"
EMBED = "embed"
HEAD = "head"
