"""What an edit is that looks at data: it changes a block site by site, as it is seen to work.

A site is what a block writes to its residual stream with: the output of attention, or of the MLP.
The pass shows each site what it reads in the edited model and what it should give, and puts what
the edit makes of it in place before it looks at the next. So a site mends what was lost before it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from compress.arch.resize.cut import Kept
from compress.arch.spec import BlockSpec, LinearSpec
from compress.checkpoint.outline import Outline
from compress.edits.latent.evidence import AttentionEvidence
from compress.edits.pool import WayToPool
from compress.edits.pool.evidence import HeadEvidence
from compress.edits.repair.ridge import Affine
from compress.edits.select.experts import ChooseExperts
from compress.report.schema import LinearRepair
from compress_calibration.moments import Moments
from compress_calibration.sequences import Aggregates, SequenceAccumulator

Options = TypeVar("Options", contravariant=True)
WRITERS = ("o", "down")  # roles of what writes to the residual stream
MOMENTS = 2 << 30  # bytes of sums of the linears of a site; of more linears they are taken in turns


def moments_bytes(n: int, k: int) -> int:
    """Of the sums of a linear [n, k]: gram and cross moments in fp32, of rows to fit by and of
    those held out."""
    return 2 * 4 * (k * k + n * k)


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How many experts of a mixture stay, and by what they are chosen. drift: the mixture should
    bring the edited residual stream to the source's; else give what it gave itself."""

    keep: int
    choose: ChooseExperts
    drift: bool


@dataclass(frozen=True, slots=True)
class HeadChoice:
    """How many heads of keys and values stay, which of them share one, and what that becomes."""

    keep: int
    groups: Callable[[HeadEvidence, int], tuple[tuple[int, ...], ...]]
    way: WayToPool


@dataclass(frozen=True, slots=True)
class Site:
    """Linears that are looked at together and changed one by one.

    own: each shall give what it gave itself before the change; else what brings the edited residual
    stream to the source's. Experts that are not their own make up together for what their mixture
    lacks, each by its share of a token.
    sequences: how their inputs are also summed sequence by sequence; None for not at all.
    producers: whether the weights that make their inputs are looked at.
    experts: of a router, which is then not changed itself but asked which experts stay; later sites
    of the block are without those that go.
    heads: of all linears of attention, which change together when heads share keys and values.
    """

    linears: tuple[LinearSpec, ...]
    own: bool = False
    sequences: Aggregates | None = None
    producers: bool = False
    experts: ExpertChoice | None = None
    heads: HeadChoice | None = None

    @property
    def is_mixture(self) -> bool:
        """Whether its linears are experts that make up for something together."""
        return not self.own and any(x.expert is not None for x in self.linears)

    def among(self, experts: Collection[int]) -> "Site":
        """The site without the linears of other experts."""
        stay = [x for x in self.linears if x.expert is None or x.expert in experts]
        return replace(self, linears=tuple(stay))

    def turns(self) -> Iterator["Site"]:
        """The site in parts whose sums fit MOMENTS together; later parts see the earlier changed.
        Sums of one linear may take more."""
        each = max(1, MOMENTS // max((moments_bytes(*x.shape) for x in self.linears), default=1))
        for start in range(0, len(self.linears), each):
            yield replace(self, linears=self.linears[start : start + each])


@dataclass(frozen=True, slots=True, eq=False)
class SiteMoments:
    """What a linear reads in the edited block (x, [tokens, K]) and what it lacks: what it should
    give beside what it gives now (y, [tokens, N]). Over the rows to fit by, and those held out.

    energy: the sum of squares of all that it should give, over the rows held out. sequences: sums
    of x by sequence; producers: weights [K, *] in the edited block whose row c makes channel c of
    x, as far as they lie row by row; both where the site asks for them. changes: of the loss
    without each channel, see `Evidence`; where the edit asks for gradients.
    """

    fit: Moments
    held: Moments
    energy: float
    sequences: SequenceAccumulator | None = None
    producers: tuple[Tensor, ...] = ()
    changes: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LinearChange:
    """What a linear becomes. now: with zeros in columns that go; None where it is as it was. kept:
    what that says of the block; of experts `ffn` has an entry for this one alone. fact: the
    report's line; None without one. beside: norms that change with it, by their tensors."""

    linear: LinearSpec
    now: Affine | None
    kept: Kept
    fact: LinearRepair | None = None
    beside: Mapping[str, Tensor] = field(default_factory=dict)


class FindSites(Protocol[Options]):
    """The sites of a block, in the order it computes them; none where nothing is to be done."""

    def __call__(self, block: BlockSpec, config: Options) -> Iterator[Site]: ...


class ChangeLinear(Protocol[Options]):
    """What a linear of a site becomes. block: that it lies in. now: what it is; seen: on data."""

    def __call__(
        self, block: BlockSpec, linear: LinearSpec, now: Affine, seen: SiteMoments, config: Options
    ) -> LinearChange: ...


class Neutral(Protocol[Options]):
    """The same options at zero compression: the edit must then change nothing."""

    def __call__(self, config: Options) -> Any: ...


class NeutralHeads(Protocol[Options]):
    """As `Neutral`, of a block in which all heads of keys and values but the first `heads` are 0.
    source: the model that the pass reads."""

    def __call__(self, source: Outline, config: Options, heads: int) -> Any: ...


class LandAttention(Protocol[Options]):
    """The tensors that take the place of q, k and v in the result's class, by their names below
    attention, in any float dtype. source: the model that the pass reads. parts: its "q", "k" and
    "v". seen: of the attention that they make."""

    def __call__(
        self,
        source: Outline,
        parts: Mapping[str, Affine],
        seen: AttentionEvidence,
        config: Options,
    ) -> Mapping[str, Tensor]: ...


def _never(config: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class BySite:
    """The functions of an edit that looks at data. by_gradients: whether its options ask for the
    gradients of the whole model, before the first block is changed. land: of an edit that puts
    attention into another class, before the sites of that are looked at; None for any other.
    of_heads: with `land`, its options for a block of few heads. evenly: whether all tokens count
    alike there, as `AttentionEvidence` has them. requeries: whether its queries are refitted
    then."""

    sites: FindSites[Any]
    change: ChangeLinear[Any]
    neutral: Neutral[Any]
    by_gradients: Callable[[Any], bool] = _never
    land: LandAttention[Any] | None = None
    of_heads: NeutralHeads[Any] | None = None
    evenly: Callable[[Any], bool] = _never
    requeries: Callable[[Any], bool] = _never


def producers_of(block: BlockSpec, linear: LinearSpec) -> list[LinearSpec]:
    """What makes the channels that a writer reads, as far as they lie row by row: one row, or with
    gate and up in one matrix two, for each channel; q, k and v in one matrix do not."""
    sizes = block.sizes
    roles = ("q", "k", "v") if sizes.heads == sizes.kv_heads else ("q",)
    roles = ("gate", "up", "gate_up") if linear.role == "down" else roles
    return [x for x in block.linears if x.role in roles and x.expert == linear.expert]


def joined(parts: Sequence[Kept]) -> Kept:
    """What all changes of a block say together; channels of experts in the order of these."""
    found: dict[str, Any] = {}
    for part in parts:
        for item in fields(part):
            value = getattr(part, item.name)
            if value is None:
                continue
            assert item.name == "ffn" or item.name not in found, f"{item.name} is cut twice"
            found[item.name] = found.get(item.name, ()) + value if item.name == "ffn" else value
    return Kept(**found)
