"""What keys and values of a text take in a cache: a token by itself, and a whole context.

The two say different things where layers have windows: such a layer keeps no more tokens than it
sees, so a text takes less than its tokens times what one leaves.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from compress.arch.resize.windowed import windows_within
from compress.arch.spec import DecoderSpec
from compress.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class CacheSize:
    """token: bytes that one leaves in all blocks together, while no window has left it behind.
    tokens: that the model reads, 0 where config.json does not say. context: bytes of a text of so
    many; None where that is not known, or what the layers see is not.
    """

    token: int
    tokens: int = 0
    context: int | None = None

    @property
    def windowed(self) -> bool:
        """Whether a text of the whole context takes less than its tokens by themselves."""
        return self.context is not None and self.context < self.token * self.tokens


def cache_size(
    config: Mapping[str, Any], spec: DecoderSpec, width: int, quantized: Collection[int] = ()
) -> CacheSize:
    """width, quantized: as DecoderSpec.kv_bytes_per_token has them."""
    token = spec.kv_bytes_per_token(width, quantized)
    try:
        windows = windows_within(config, spec)
    except CheckpointError:  # no table says what its layers see
        return CacheSize(token, spec.context)
    if not spec.context or not token:
        return CacheSize(token, spec.context)
    kept = [spec.context if window is None else window for window in windows]
    return CacheSize(token, spec.context, spec.kv_bytes(kept, width, quantized))
