"""What a forward of a block keeps alive beside its weights."""

from compress.arch.spec import DecoderSpec

# Tensors a token: hidden-sized ones (residual, norms in fp32, q, k, v, rotated copies) and
# feed-forward ones (gate, its activation, up, their product).
LIVE_HIDDEN, LIVE_WIDE = 12, 4
# Longer batches gain nothing, every matrix product is large enough by then, and cost memory:
# 16,384 tokens of a 256-wide model took 72 MB more than 8,192 and not a moment less.
MAX_BATCH_TOKENS = 8192
# Bytes that a batch keeps alive in a block where two blocks and the moments of a linear are beside
# it: at 7B widths in fp32 720 tokens, where 8,192 would take 3 GB, more than both blocks.
MAX_LIVE = 256 << 20


def live_bytes(spec: DecoderSpec, tokens: int, width: int) -> int:
    """Of so many tokens inside a block, whose numbers have `width` bytes."""
    return tokens * width * (LIVE_WIDE * spec.intermediate + LIVE_HIDDEN * spec.hidden)
