"""What a forward of a block keeps alive beside its weights."""

from compress.arch.spec import DecoderSpec

# Tensors a token: hidden-sized ones (residual, norms in fp32, q, k, v, rotated copies) and
# feed-forward ones (gate, its activation, up, their product).
LIVE_HIDDEN, LIVE_WIDE = 12, 4


def live_bytes(spec: DecoderSpec, tokens: int, width: int) -> int:
    """Of so many tokens inside a block, whose numbers have `width` bytes."""
    return tokens * width * (LIVE_WIDE * spec.intermediate + LIVE_HIDDEN * spec.hidden)
