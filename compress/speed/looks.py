"""What attention takes on this machine: of a token that is its text's only one in a step, by how
much the step reads, and of the tokens of a prompt."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compress.arch.forward.forward import ForwardSpec
from compress.arch.forward.kinds import Grouped, Latent
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.one_call import MOST
from compress.speed.roofline import LookRates, line
from compress.speed.timer import TIMES, Timer
from compress.speed.workload import AttentionWork
from compress_kernels.ops.attention import paged_attention
from compress_kernels.paged import TokenPlaces

# Bytes that steps read: those that caches hold, and those that none does. With nothing between 16
# and 64 MB, steps of tale-6m that read 41 were expected to take 47 to 51 ms in place of 62.
CACHE_BYTES = (4 << 20, 16 << 20, 32 << 20, 64 << 20)
# Positions of a text whose attention is measured.
POSITIONS, BLOCK = 256, 16


def measure_looks(
    how: ForwardSpec, part: AttentionWork, dtypes: tuple[torch.dtype, torch.dtype], timer: Timer
) -> LookRates:
    """Seconds of one token and one position, in one of the layers of `part`. dtypes: of what is
    computed, and of keys and values."""
    length = min(POSITIONS, how.layers[part.sample].window or POSITIONS)
    text = -(-length // BLOCK) * BLOCK * part.state_bytes
    single = []
    for nbytes in CACHE_BYTES:
        texts = max(1, min(MOST, nbytes // text))
        at = torch.arange(texts, device=timer.device, dtype=torch.int32)
        last = torch.full_like(at, length - 1, dtype=torch.int64)
        seen = _attention(how, part, (at, last), dtypes, timer)
        if length > 1:  # what does not depend on it stands between products
            seen -= _attention(how, part, (at, torch.zeros_like(last)), dtypes, timer)
        single.append((float(nbytes), max(0.0, seen) / (texts * max(1, length - 1))))
    positions = torch.arange(length, device=timer.device)
    places = torch.zeros_like(positions, dtype=torch.int32), positions
    pairs = length * (length + 1) // 2
    return LookRates(line(single), _attention(how, part, places, dtypes, timer) / pairs)


def _attention(
    how: ForwardSpec,
    part: AttentionWork,
    tokens: tuple[Tensor, Tensor],
    dtypes: tuple[torch.dtype, torch.dtype],
    timer: Timer,
) -> float:
    """Seconds of some tokens in one of the layers of `part`. tokens: the number of the text and the
    position of each; texts have as many positions as any token has."""
    device, (dtype, kv_dtype), (sequence, positions) = timer.device, dtypes, tokens
    layer = how.layers[part.sample]
    assert isinstance(layer, Grouped | Latent), "no other kind is computed"
    count, blocks = int(sequence[-1]) + 1, -(-(int(positions.max()) + 1) // BLOCK)
    one = replace(how, rows=(layer,), kinds=(0,))
    cache = KVCache(one, [1 + count * blocks], BLOCK, dtype=kv_dtype, device=device)
    _fill(cache)
    # Blocks lie anywhere, as those of texts that come and go.
    order = torch.randperm(count * blocks, generator=torch.Generator().manual_seed(0))
    table = (1 + order).to(device, torch.int32)
    stored = cache.keys_and_values(0)
    q = torch.rand(len(positions), layer.heads, stored.keys.shape[3], dtype=torch.float32)
    call = partial(
        paged_attention,
        q.to(device, dtype),
        stored,
        TokenPlaces(table.view(count, blocks), sequence, positions),
        scale=layer.scale,
        softcap=layer.softcap,
    )
    return timer.seconds(call, TIMES)


def _fill(cache: KVCache) -> None:
    """Numbers in every position: pages that nobody wrote are one page of zeros to the system, which
    stays in the first-level cache. A position of tale-6m then took 37 ns in steps of any size; it
    takes 35 in those of 4 MB and 75 to 110 in those of 64."""
    for states, scales in zip(cache.states[0], cache.scales[0], strict=True):
        if states.dtype == torch.int8:
            states.random_(-127, 128)
        else:
            states.uniform_(-1, 1)
        if scales is not None:
            scales.fill_(0.01)
