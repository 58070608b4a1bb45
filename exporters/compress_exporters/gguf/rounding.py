"""What GGUF's fp16 does to scales and offsets: what is refused, and what is told."""

from compress.errors import RecipeError
from compress.formats.scales import ScaleRounding


def require_fp16(found: ScaleRounding, *, round_scales: bool) -> None:
    """RecipeError for scales and offsets that are lost, or change though nobody asked for it."""
    count = f"of {found.total} scales and offsets are"
    if found.lost:
        raise RecipeError(
            f"{found.lost} {count} too large or too small for fp16, in which GGUF's blocks have"
            " them; take onnx, which keeps them"
        )
    if found.changed and not round_scales:
        raise RecipeError(
            f"{found.changed} {count} not exact in fp16, in which GGUF's blocks have them (the"
            f" largest changes by {found.largest:.2g} of its value); let them be rounded with"
            " --round-scales (round_scales: true in a recipe's export)"
        )
