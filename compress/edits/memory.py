"""How much memory an edit that looks at data works with, counted before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from compress.arch.spec import BlockSpec, LinearSpec
from compress.blocks.live import live_bytes
from compress.checkpoint.outline import Outline
from compress.edits.latent.queries import looked_bytes
from compress.edits.learned import MOMENTS, WRITERS, BySite, moments_bytes
from compress.edits.repair.ridge import refit_bytes
from compress.edits.select.experts import asking_bytes
from compress.edits.select.obs import select_bytes
from compress.edits.work import Work, looked_work
from compress_calibration.config import CalibrationConfig

FP32 = torch.float32.itemsize
# Of the second moments of keys and values: they, weighed, and what finding components takes.
LATENT_COPIES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Between:
    """What a pass goes between. given: the model of the run, whose blocks are looked at beside
    those of `source`. result: what it leaves. is_open: data has yet to choose among sizes of which
    these are the largest. looked: bytes that are kept of texts while queries are refitted."""

    given: Outline
    source: Outline
    result: Outline
    is_open: bool = False
    looked: int = 0


@dataclass(frozen=True, slots=True)
class _SiteBytes:
    """moments: of all linears of a site that are looked at together. solve: of the widest of them,
    the moments not included."""

    moments: int = 0
    solve: int = 0


def learned_bytes(models: Between, dtype: torch.dtype, tokens: int) -> int:
    """Most bytes that a pass works with: a block of both models with a batch of `tokens` tokens in
    each and the moments of a site, or what experts answer, or the solve of the first site; or the
    solve of the last one, the widest, before which the blocks are freed, but for experts, which are
    most of a block; of a batch the allocator keeps the buffers, as most are below 32 MB (450 MB
    with 477 MB alive in a block of 7B widths)."""
    width = max(dtype.itemsize, FP32)  # the first block is tried in fp32
    blocks = width * (block_weights(models.given) + block_weights(models.source))
    live = live_bytes(models.given.spec, tokens, width)
    first, last = (_site(models, role) for role in WRITERS)
    experts, heads = asking_bytes(models.source.spec.experts), _heads_pooled(models)
    asked = max(experts, heads, _latent(models), models.looked)
    seen = max(first.moments, last.moments, asked)
    beside = blocks + max(2 * live + seen, live + first.moments + first.solve)
    stays = blocks if models.source.spec.experts else 0
    return max(beside, stays + live + last.moments + last.solve)


def _heads_pooled(models: Between) -> int:
    """Where heads come to share keys and values, in fp64: the sums of these with what one group of
    all of them takes, or with the linears of attention, of which one is being changed."""
    before, after = models.source.spec, models.result.spec
    if models.is_open or after.kv_heads == before.kv_heads or after.heads < before.heads:
        return 0
    values = max(block.sizes.of("v") for block in before.blocks)
    of_attention = [x.shape for x in before.linears() if x.role in ("q", "qkv", "o")]
    return 8 * max(7 * values**2, values**2 + 6 * max(map(prod, of_attention)))


def _latent(models: Between) -> int:
    """Where keys and values become one latent, in fp64: their second moments, and the principal
    components of these."""
    before, after = models.source.spec.blocks[0].sizes, models.result.spec.blocks[0].sizes
    if after.latent is None or before.latent is not None:
        return 0
    return 8 * LATENT_COPIES * (before.of("k") + before.of("v")) ** 2


@dataclass(frozen=True, slots=True)
class QueryWork:
    """What a refit of queries takes. bytes: that are kept of texts."""

    bytes: int
    work: Work


def looked_by(work: object, config: Any, result: Outline, data: CalibrationConfig) -> QueryWork:
    """What a pass takes for that; nothing where it refits none."""
    if not isinstance(work, BySite) or not work.requeries(config):
        return QueryWork(0, Work(0.0))
    tokens, sizes = data.samples * data.length, result.spec.blocks[0].sizes
    kept = looked_bytes(tokens, data.length, sizes, result.spec.hidden)
    return QueryWork(kept, looked_work(result, tokens, data.length))


def block_weights(model: Outline) -> int:
    """Weights of the linears of the largest block."""
    return max(sum(prod(x.shape) for x in block.linears) for block in model.spec.blocks)


def _site(models: Between, role: str) -> _SiteBytes:
    """Of the block of which it is the most. Linears of experts are looked at together as far as
    MOMENTS goes, where they are cut or fewer; those of a block are solved one by one."""
    kept = min(k for _, k in (x.shape for x in models.result.spec.linears() if x.role == role))
    sites = [_looked_at(block, role, kept, models) for block in models.source.spec.blocks]
    return _SiteBytes(
        max(map(_moments, sites)),
        max((_solving(x, kept, models) for site in sites for x in site), default=0),
    )


def _moments(site: Sequence[LinearSpec]) -> int:
    """Of the linears that are looked at in one turn."""
    each = [moments_bytes(*x.shape) for x in site]
    return max(max(each, default=0), min(sum(each), MOMENTS))


def _looked_at(block: BlockSpec, role: str, kept: int, models: Between) -> Sequence[LinearSpec]:
    site = [x for x in block.linears if x.role == role]
    fewer = models.result.spec.experts < models.source.spec.experts
    cut = models.is_open or fewer or any(kept < x.shape[1] for x in site)
    return [x for x in site if cut or x.expert is None]


def _solving(linear: LinearSpec, kept: int, models: Between) -> int:
    n, k = linear.shape
    fitting = max(refit_bytes(n, k, kept), refit_bytes(n, k, k - 1) if models.is_open else 0)
    return FP32 * n * k + max(select_bytes(k), fitting)
