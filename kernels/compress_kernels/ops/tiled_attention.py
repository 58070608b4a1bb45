"""Attention over blocks in vectorised torch, for GPUs and machines without a compiler.

Queries of a text go in tiles of 16 rows, what they see in tiles of 64 positions that begin at
multiples of 64, and the softmax is carried from tile to tile. Every matrix product has one shape,
whatever a step holds, only their number differs; a position that a row does not see adds exact
zeros. So a row's bits are its own wherever products of one shape give each row the same bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress_kernels.paged import StoredStates, TokenPlaces

QUERIES = 16
POSITIONS = 64
GATHERED = 16 << 20  # keys of so many fp32 numbers are gathered at once, at most


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """N tiles of 16 queries, each of one text.

    rows: int64 [N, 16], the queries; in an empty place one of the tile's own. table: [N, blocks].
    positions: int64 [N, 16]. first: int64 [N, 16], the first position that a query sees.
    """

    rows: Tensor
    table: Tensor
    positions: Tensor
    first: Tensor


def paged_attention(
    q: Tensor,
    stored: StoredStates,
    places: TokenPlaces,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As attention.paged_attention, arguments checked."""
    width = stored.values.shape[3]
    out = q.new_empty(*q.shape[:2], width)
    rows = _tiles(places.sequence)
    widest = max(width, stored.keys.shape[3])
    size = max(1, GATHERED // (POSITIONS * stored.keys.shape[1] * widest))
    for part in torch.split(rows, size):
        at, texts = places.positions[part], places.sequence[part[:, 0]].long()
        first = torch.zeros_like(at) if window is None else (at - window + 1).clamp_(min=0)
        tiles = Tiles(part, places.table[texts].long(), at, first)
        out[part] = _attend(q, tiles, stored, scale, softcap).to(q.dtype)
    return out


def _tiles(sequence: Tensor) -> Tensor:
    """Rows of each tile: int64 [N, 16]."""
    order = sequence.argsort(stable=True)
    counts = sequence.bincount()
    tiles = -(-counts // QUERIES)
    begin = counts.cumsum(0) - counts
    owner = torch.repeat_interleave(tiles)  # of each tile the number of its text
    number = torch.arange(owner.numel(), device=owner.device) - (tiles.cumsum(0) - tiles)[owner]
    place = number[:, None] * QUERIES + torch.arange(QUERIES, device=owner.device)
    # An empty place repeats the text's last query, which is then computed twice.
    place = torch.minimum(place, counts[owner, None] - 1)
    return order[begin[owner, None] + place]


def _attend(
    q: Tensor, tiles: Tiles, stored: StoredStates, scale: float, softcap: float | None
) -> Tensor:
    """fp32 [N, 16, heads, value width]."""
    heads, dim = q.shape[1:]
    kv_heads = stored.keys.shape[1]
    count, group = len(tiles.rows), heads // kv_heads
    # Queries that read one head of keys lie together: [N, kv_heads, group * 16, key width].
    queries = q[tiles.rows].float().view(count, QUERIES, kv_heads, group, dim)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, group * QUERIES, dim)
    top = queries.new_full((count, kv_heads, group * QUERIES, 1), -torch.inf)
    width = stored.values.shape[3]
    total, out = torch.zeros_like(top), queries.new_zeros(*queries.shape[:3], width)
    low, high = tiles.first.amin(1), tiles.positions.amax(1)
    for start in range(int(low.min()) // POSITIONS * POSITIONS, int(high.max()) + 1, POSITIONS):
        live = torch.where((low < start + POSITIONS) & (high >= start))[0]
        at = start + torch.arange(POSITIONS, device=q.device)
        seen = (at >= tiles.first[live, :, None]) & (at <= tiles.positions[live, :, None])
        keys, values = _gather(stored, tiles.table[live], at, seen.any(1))
        scores = queries[live] @ keys.transpose(-1, -2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        hidden = ~seen.repeat(1, group, 1)[:, None]
        scores.masked_fill_(hidden, -torch.inf)
        highest = torch.maximum(top[live], scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet: no difference of infinities.
        base = highest.masked_fill(highest == -torch.inf, 0.0)
        weights, kept = (scores - base).exp_(), (top[live] - base).exp_()
        top[live] = highest
        total[live] = total[live] * kept + weights.sum(-1, keepdim=True)
        out[live] = out[live] * kept + weights @ values
    out = (out / total).view(count, kv_heads, group, QUERIES, width)
    return out.permute(0, 3, 1, 2, 4).reshape(count, QUERIES, heads, width)


def _gather(stored: StoredStates, table: Tensor, at: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of 64 positions: fp32 [N, kv_heads, 64, width] each; zero where no query of
    the tile sees them, for what lies there may be anything."""
    kv_heads, size = stored.keys.shape[1:3]
    blocks = table[:, (at // size).clamp_(max=table.shape[1] - 1)]
    heads = torch.arange(kv_heads, device=at.device)[:, None]
    places = (blocks[:, None] * kv_heads + heads) * size + at % size  # [N, kv_heads, 64]
    gone = ~seen[:, None, :, None]

    def read(states: Tensor, scales: Tensor | None) -> Tensor:
        rows = states.view(-1, states.shape[3]).index_select(0, places.view(-1))
        found = rows.float().view(*places.shape, -1)
        if scales is not None:
            found *= scales.view(-1)[places][..., None].float()
        return found.masked_fill_(gone, 0.0)

    if stored.shared:
        keys = read(stored.keys, stored.key_scales)
        return keys, keys[..., : stored.values.shape[3]]
    return read(stored.keys, stored.key_scales), read(stored.values, stored.value_scales)
