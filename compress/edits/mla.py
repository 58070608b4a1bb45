"""mla: keys and values of all heads become one latent and one rotated key, in a stock class.

DeepSeek-V2: A strong, economical, and efficient mixture-of-experts language model. 2024,
https://arxiv.org/abs/2405.04434, section 2.1, has the attention; that trained models can be brought
into it is shown by TransMLA (https://arxiv.org/abs/2502.07864) and MHA2MLA
(https://arxiv.org/abs/2502.14837). Here the keys' principal components at each frequency keep their
rotation (compress/edits/latent/rotated.py), the rest of keys and the values share a latent in the
metrics of scores and outputs (joint.py), and both land in DeepseekV3ForCausalLM as it is
(landing.py, stock.py). With `repair: drift` queries are then refitted to what the source's heads
attend to (queries.py), and the outputs of attention and MLP to its residual stream. Left out: a
latent of queries, which caches nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from torch import Tensor

from compress.arch.forward.norms import stream_norms
from compress.arch.sizes import BlockSizes
from compress.arch.spec import BlockSpec, LinearSpec
from compress.checkpoint.outline import Outline
from compress.edits.counts import Amount, check_amount, counted_of
from compress.edits.edit import Edited
from compress.edits.latent.evidence import AttentionEvidence
from compress.edits.latent.joint import joint_latent
from compress.edits.latent.landing import Latents, landed
from compress.edits.latent.rotation import KNOWN, Choice, rope_parameters
from compress.edits.latent.source import SourceAttention, attention_of
from compress.edits.latent.splits import splits_of
from compress.edits.latent.starts import STARTS, Way, check_fold, check_start
from compress.edits.latent.stock import (
    EPS,
    LatentShape,
    context_of,
    stock_config,
    stock_entries,
    stream_scale,
)
from compress.edits.learned import LinearChange, Site, SiteMoments
from compress.edits.repair.ridge import Affine
from compress.edits.writers import check_roles, mended, writer_sites
from compress.errors import RecipeError


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """kv_bytes: what a token may leave in the cache, as a share of what it leaves in the source's;
    or rank and rope_dim: numbers of the latent and of the rotated key, each with a point a share of
    what loses nothing. multiple_of: of what the rank is a multiple where a budget is split, as
    stages that round in groups may need.

    rope: which frequencies the rotated key has. frequencies: those that were chosen, by index, in
    place of measuring them. start: by what keys and values are measured, by scores and outputs or
    as others do. freqfold: so many neighbouring frequencies are taken for one where the keys that
    rotate are found. repair: what is refitted.
    """

    kv_bytes: float | None = None
    rank: Amount | None = None
    rope_dim: Amount | None = None
    multiple_of: int = 1
    rope: Choice = "any"
    frequencies: tuple[int, ...] | None = None
    start: Way = "scores"
    freqfold: int = 1
    repair: Literal["drift", "none"] = "drift"

    def __post_init__(self) -> None:
        check_amount("rank", self.rank)
        check_amount("rope_dim", self.rope_dim)
        if self.multiple_of < 1:
            raise RecipeError(f"multiple_of is {self.multiple_of}; it is 1 or more")
        if (self.rank is None) != (self.rope_dim is None):
            given, missing = ("rank", "rope_dim") if self.rope_dim is None else ("rope_dim", "rank")
            raise RecipeError(f"{given} is given and {missing} is not; both say what is cached")
        if (self.kv_bytes is None) == (self.rank is None):
            raise RecipeError(
                "kv_bytes is missing; say what may be cached, 0.25 of the source's, or give rank"
                " and rope_dim"
                if self.kv_bytes is None
                else "kv_bytes is given beside rank and rope_dim; one of them says what is cached"
            )
        if self.kv_bytes is not None and not 0 < self.kv_bytes < 1:
            raise RecipeError(
                f"kv_bytes is {self.kv_bytes}; it is a share of the source's cache, above 0 and"
                " below 1"
            )
        check_start(self.start, self.rope, self.freqfold)
        if self.frequencies is not None and (self.rope != "any" or self.kv_bytes is not None):
            raise RecipeError(
                "frequencies says what rope: any has chosen, beside rank and rope_dim; leave it out"
            )

    def counted(self, source: Outline, model: Outline) -> "MlaConfig":
        """Shares of what the recipe's source has as those of the model; see HasShares."""
        check_roles(model.spec)
        before, now = (x.spec.blocks[0].sizes for x in (source, model))
        if before.latent is not None or now.latent is not None:
            return self  # refused in the plan
        if (before.of("k"), before.of("v")) == (now.of("k"), now.of("v")):
            return self
        if self.kv_bytes is not None:
            share = self.kv_bytes * _cached(before) / _cached(now)
            if share >= 1:
                raise RecipeError(
                    f"kv_bytes is {self.kv_bytes} of the source's cache, and the model that the"
                    f" stage reads has {_cached(now) / _cached(before):g} of it; give less"
                )
            return replace(self, kv_bytes=share)
        assert self.rank is not None, "one of them says what is cached"
        assert self.rope_dim is not None, "rank comes with it"
        rank = counted_of("rank", self.rank, now.of("v"), source=before.of("v"))
        rotated = counted_of("rope_dim", self.rope_dim, now.of("k"), source=before.of("k"))
        return replace(self, rank=rank, rope_dim=rotated)

    @property
    def is_open(self) -> bool:
        """Whether the rank, or frequencies, have yet to be measured."""
        chosen = self.rope != "any" or self.frequencies is not None or self.rope_dim == 1.0
        return self.kv_bytes is not None or not chosen


def _cached(sizes: BlockSizes) -> int:
    """Numbers of keys and values of a token in a layer."""
    return sizes.of("k") + sizes.of("v")


def plan(source: Outline, config: MlaConfig) -> Edited:
    """The same model in another class; where rank and rope_dim are not chosen yet, of most bytes.

    CheckpointError for attention that the class does not have; RecipeError for sizes above what
    loses nothing.
    """
    check_roles(source.spec)
    return plan_among(source, config, splits(attention_of(source), config))


def plan_among(source: Outline, config: MlaConfig, among: Sequence[MlaConfig]) -> Edited:
    """As `plan`. among: of the splits of the budget those that are measured."""
    attention = attention_of(source)
    check_fold(config.freqfold, attention.rope.dim // 2)
    shapes = [shape_of(attention, each) for each in among]
    most = max(
        shapes, key=lambda shape: sum(prod(dims) for _, _, dims in stock_entries(source, shape))
    )
    known = replace(config, kv_bytes=None, rank=most.rank, rope_dim=most.rotated)
    if not config.is_open:
        known = config
    kept = frequencies_of(attention, known)
    rope = rope_parameters(attention.rope, config.rope, kept, context_of(source))
    made = stock_config(source, most, rope)
    eps = stream_norms(source.config, source.spec).eps
    scale = stream_scale(eps, source.main_dtype)
    notes = (*_notes(shapes, config), *_of_eps(eps, EPS / scale**2))
    return Edited(made, tuple(stock_entries(source, most)), notes, stream=scale)


def _of_eps(before: float, after: float) -> Iterator[str]:
    if abs(after / before - 1) > 1e-6:
        yield (
            f"norms get an eps of {after:.2g} in place of {before:.2g}: the class has 1e-6, and"
            " what is stored in 16 bits is scaled by powers of two only; {method: cast, dtype:"
            " fp32} before it keeps the eps"
        )


def splits(attention: SourceAttention, config: MlaConfig) -> list[MlaConfig]:
    """The options with rank and rope_dim: as they are, or each that spends the budget."""
    if config.kv_bytes is None:
        return [config]
    whole = budget_of(attention, config)
    found = splits_of(attention, whole, config.rope, config.multiple_of)
    if not found:
        raise RecipeError(
            f"kv_bytes is {config.kv_bytes}, which is {whole} numbers a token; a latent and a"
            " rotated key take more"
        )
    return [replace(config, kv_bytes=None, rank=rank, rope_dim=key) for rank, key in found]


def budget_of(attention: SourceAttention, config: MlaConfig) -> int:
    """Numbers that a token may leave in a layer."""
    assert config.kv_bytes is not None, "rank and rope_dim are known"
    return int(config.kv_bytes * (attention.keys + attention.values) + 1e-9)


def shape_of(attention: SourceAttention, config: MlaConfig) -> LatentShape:
    """RecipeError for sizes above what loses nothing, and for an odd rope_dim."""
    assert config.rank is not None, "splits have a rank"
    assert config.rope_dim is not None, "splits have a rope_dim"
    rank = counted_of("rank", config.rank, attention.values)
    rotated = counted_of("rope_dim", config.rope_dim, attention.keys)
    if rotated % 2:
        raise RecipeError(f"rope_dim is {rotated}; numbers are rotated in twos, give an even one")
    kind = attention.kind
    return LatentShape(rank, rotated, kind.key_width, kind.value_width, attention.biased)


def frequencies_of(attention: SourceAttention, config: MlaConfig) -> tuple[int, ...]:
    """Those of the rotated key; the fastest where data has yet to choose."""
    count = attention.rope.dim // 2
    shape = shape_of(attention, config)
    kept = shape.rotated // 2
    if config.rope != "any":
        return KNOWN[config.rope](count, kept)
    every = tuple(f for f in range(count) for _ in range(attention.kind.kv_heads))
    if config.frequencies is None:
        return every if shape.rotated == attention.keys else every[:kept]
    given = config.frequencies
    most = max((given.count(f) for f in given), default=0)
    if len(given) != kept or most > attention.kind.kv_heads or not set(given) <= set(range(count)):
        raise RecipeError(
            f"frequencies has {len(given)} indices; it takes {kept} of 0 to {count - 1}, each at"
            f" most {attention.kind.kv_heads} times"
        )
    return given


def _notes(shapes: Sequence[LatentShape], config: MlaConfig) -> Iterator[str]:
    first, *others = shapes
    sizes = f": a latent of {first.rank} and a rotated key of {first.rotated} numbers"
    if others:
        sizes = (
            "; how many numbers its latent and its rotated key have is measured:"
            f" {', '.join(x.split for x in shapes)}"
        )
    yield f"the result is a deepseek_v3 (DeepseekV3ForCausalLM) without a mixture{sizes}"
    yield "run it in bf16 or fp32: before its norm the latent is of 1e-7, which fp16 loses"
    if config.rope == "any":
        yield (
            "its frequencies are factors of longrope, which transformers reads; vLLM puts another"
            " rotation in their place without a word: for vLLM take rope: stride or top"
        )


def sites(block: BlockSpec, config: MlaConfig) -> Iterator[Site]:
    """What writes to the residual stream, of a block that has its latents."""
    yield from writer_sites(block, (), config.repair)


def change(
    block: BlockSpec, linear: LinearSpec, now: Affine, seen: SiteMoments, config: MlaConfig
) -> LinearChange:
    """Refit a linear to the source's residual stream."""
    return mended(linear, now, seen, config.repair)


def neutral(config: MlaConfig) -> MlaConfig:
    """Every frequency of every head is rotated, and values have a number each."""
    return replace(
        config,
        kv_bytes=None,
        rank=1.0,
        rope_dim=1.0,
        rope="any",
        frequencies=None,
        start="scores",
        freqfold=1,
    )


def neutral_of(source: Outline, config: MlaConfig, heads: int) -> MlaConfig:
    """`neutral` of a block in which all heads of keys and values but the first `heads` are 0."""
    attention = attention_of(source)
    kind, count = attention.kind, attention.rope.dim // 2
    every = tuple(f for f in range(count) for _ in range(heads))
    rank, rotated = heads * kind.value_width, 2 * len(every)
    return replace(neutral(config), rank=rank, rope_dim=rotated, frequencies=every)


def counts_evenly(config: MlaConfig) -> bool:
    """Whether tokens count alike, however much heads attend to them."""
    return config.start != "scores"


def refits_queries(config: MlaConfig) -> bool:
    """Whether queries are refitted to what the source's heads attend to."""
    return config.repair == "drift"


def land(
    source: Outline, parts: Mapping[str, Affine], seen: AttentionEvidence, config: MlaConfig
) -> Mapping[str, Tensor]:
    """The new tensors of attention, by their names below it, fp64. parts: "q", "k" and "v" as they
    are; seen: of them."""
    attention = attention_of(source)
    kept = frequencies_of(attention, config)
    start = STARTS[config.start](seen, parts, kept, config.freqfold)
    joint = joint_latent(start, shape_of(attention, config).rank)
    made = Latents(start.key, joint, attention.scale)
    return landed(parts, start.seen, made, biased=attention.biased)
