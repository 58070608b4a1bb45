"""Units of a run that are not blocks: what the journal calls them, and what a user reads."""

OUTSIDE = "outside"
EMBED = "embed"
HEAD = "head"
IDENTITY = "identity"  # that an edit changes nothing where it leaves everything
_SHOWN = {
    OUTSIDE: "tensors outside the blocks",
    EMBED: "embedded tokens",
    HEAD: "output head",
    IDENTITY: "identity at zero compression",
    "calibration": "calibration tokens",
    "gradients": "gradients of the whole model",
    "basis": "basis of the residual stream",
}


def block_unit(index: int) -> str:
    """The unit of a block."""
    return f"block {index}"


def shown(unit: str) -> str:
    """A unit's name in progress: "block 3" is one already."""
    return _SHOWN.get(unit, unit)
