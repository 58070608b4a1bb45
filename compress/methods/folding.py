"""Folds: scaling channels between two modules so that the weights that read them quantize better.

Dividing a channel where a norm or a linear writes it, and multiplying the readers' columns by the
same, leaves the function as it is. AWQ and SmoothQuant are two ways of choosing the scale; this
file is what they share and how a scale reaches every tensor that it concerns.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from compress.arch.spec import BlockSpec, FoldPair, LinearSpec
from compress.quant.scheme import QuantScheme, Signs
from compress_calibration.hessian import InputStats

UNDRIVEN = "calibration drove none of its channels"


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """scale: fp32 [C], above 0: the writer's channels are divided by it, the columns that read
    them multiplied."""

    pair: FoldPair
    scale: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FoldChoice:
    """What a search found for a pair.

    scale: fp32 [C], or None to leave the pair alone. note: why, for the report.
    plain, loss: the search's own objective without and with the scale, where it has one.
    """

    scale: Tensor | None
    note: str
    plain: float | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FoldReader:
    """A linear of a pair that will be quantized.

    weight: the source's, [N, K], in the dtype stored, which is also that of its scales.
    rows, columns: earlier folds, as in `Folds`; None for none. They are applied where asked for,
    so that a wide mixture is never in memory as fp32.
    signs: of the scales that it will get.
    """

    weight: Tensor
    scheme: QuantScheme
    rows: Tensor | None = None
    columns: Tensor | None = None
    signs: Signs = "auto"

    def folded(self, step: int = 1) -> Tensor:
        """Every `step`-th row with all earlier folds applied: fp32 [N / step rounded up, K]."""
        rows = None if self.rows is None else self.rows[::step]
        return _scaled(self.weight[::step], rows, self.columns)


@dataclass(frozen=True, slots=True, eq=False)
class PairView:
    """What a search sees of a pair, with all earlier folds of the block applied.

    readers: those that will be quantized; the others (a router) follow whatever is found.
    hessian: fp32 [K, K], mean of x xᵀ over what the readers read. absmax, absmean: fp32 [K].
    """

    pair: FoldPair
    readers: tuple[FoldReader, ...]
    hessian: Tensor
    absmax: Tensor
    absmean: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Folds:
    """All folds of one block so far, by checkpoint tensor.

    rows: fp32 [N], by which the rows of a weight [N, K], or the elements of a bias or a norm [N],
    are divided. columns: fp32 [K], by which the columns of a weight are multiplied.
    offsets: of norms that add something to their weight before they multiply (FoldPair.offset).
    """

    linears: Mapping[str, LinearSpec]
    rows: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    offsets: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, block: BlockSpec) -> "Folds":
        """No folds yet."""
        return cls({linear.name: linear for linear in block.linears})

    def add(self, fold: Fold) -> None:
        """Apply a further fold, behind those already here."""
        pair, scale = fold.pair, fold.scale.float()
        assert bool((torch.isfinite(scale) & (scale > 0)).all()), pair.writer
        size = self.linears[pair.writer].shape[0] if pair.kind == "linear" else pair.rows[1]
        divisor = scale.new_ones(size)
        divisor[pair.channels()] = scale
        for tensor in pair.tensors:
            _multiply(self.rows, tensor, divisor)
        self.offsets[pair.tensors[0]] = pair.offset
        factor = expand(pair, scale)
        for reader in pair.readers:
            _multiply(self.columns, self.linears[reader].tensor, factor)

    def touches(self, tensor: str) -> bool:
        """Whether a checkpoint tensor is another one after the folds."""
        return tensor in self.rows or tensor in self.columns

    def weight(self, tensor: str, weight: Tensor) -> Tensor:
        """A linear's weight after the folds: fp32 [N, K], from any dtype, [N, K] on the way in
        whatever the order on disk. The argument is left as it is."""
        return _scaled(weight, self.rows.get(tensor), self.columns.get(tensor))

    def vector(self, tensor: str, vector: Tensor) -> Tensor:
        """A norm's weight or any bias [N] after the folds, in the dtype it came in."""
        if tensor not in self.rows:
            return vector
        offset = self.offsets.get(tensor, 0.0)
        divided = (vector.float() + offset) / self.rows[tensor].to(vector.device)
        return (divided - offset).to(vector.dtype)

    def stats(self, tensor: str, stats: InputStats) -> InputStats:
        """Statistics of what the linear with weight `tensor` reads after the folds.

        stats: those without any fold, as the source's block shows them.
        """
        if tensor not in self.columns:
            return stats
        s = self.columns[tensor].to(stats.hessian.device)
        return replace(
            stats,
            hessian=(stats.hessian / s[:, None]).div_(s),
            absmax=None if stats.absmax is None else stats.absmax / s,
            absmean=None if stats.absmean is None else stats.absmean / s,
        )

    def view(
        self,
        pair: FoldPair,
        weights: Mapping[str, Tensor],
        schemes: Mapping[str, QuantScheme],
        stats: InputStats,
        signs: Mapping[str, Signs],
    ) -> PairView:
        """What a search sees of a pair.

        weights: the source's weight [N, K] of the readers, by name, in the dtype stored.
        schemes: of the readers that will be quantized, by name. stats: of what the readers read,
        without any fold, magnitudes included. signs: of the scales of the readers, by name.
        """
        seen = self.stats(self.linears[pair.readers[0]].tensor, stats)
        assert seen.absmax is not None, pair.writer
        assert seen.absmean is not None, pair.writer
        readers = []
        for name in (name for name in pair.readers if name in schemes):
            tensor = self.linears[name].tensor
            rows, columns = self.rows.get(tensor), self.columns.get(tensor)
            readers.append(FoldReader(weights[name], schemes[name], rows, columns, signs[name]))
        return PairView(pair, tuple(readers), seen.hessian, seen.absmax, seen.absmean)


def expand(pair: FoldPair, channels: Tensor) -> Tensor:
    """Values of the channels [C] at the readers' columns [K], K = C * repeat."""
    if pair.repeat == 1:
        return channels
    heads = channels.reshape(-1, 1, pair.head_dim)  # [kv_heads, 1, head_dim]
    return heads.expand(-1, pair.repeat, -1).reshape(-1)


def by_channel(pair: FoldPair, columns: Tensor) -> Tensor:
    """Values at the readers' columns [K] as [repeat, C]: one row for each reader of a channel."""
    if pair.repeat == 1:
        return columns[None]
    heads = columns.reshape(-1, pair.repeat, pair.head_dim)  # [kv_heads, repeat, head_dim]
    return heads.transpose(0, 1).reshape(pair.repeat, -1)


def storable(fold: Fold, norm: Tensor) -> Fold:
    """The fold that a norm's weight can hold in the dtype it is stored in.

    norm: [C], the weight before the fold. What it becomes is rounded to its dtype, and the scale
    redefined as old / new in fp32, so that norm and readers together are exact; old and new are
    what the norm multiplies by, its offset included. A channel that cannot be divided (weight 0,
    or nothing but 0 or Inf to store) gets scale 1.
    """
    offset = fold.pair.offset
    old = norm.float() + offset
    new = (old / fold.scale.to(old.device) - offset).to(norm.dtype).float() + offset
    scale = old / new
    good = torch.isfinite(scale) & (scale > 0) & torch.isfinite(new)
    return replace(fold, scale=torch.where(good, scale, torch.ones_like(scale)))


def keep_finite(fold: Fold, bias: Tensor, dtype: torch.dtype) -> Fold:
    """The fold with scale 1 at channels whose bias [C] it would make infinite in `dtype`.

    bias: fp32, the writer's before the fold; dtype: the one it is stored in.
    """
    finite = torch.isfinite((bias / fold.scale.to(bias.device)).to(dtype))
    finite = finite.to(fold.scale.device)
    return replace(fold, scale=torch.where(finite, fold.scale, torch.ones_like(fold.scale)))


def _scaled(weight: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """fp32 weight [N, K], rows divided and columns multiplied; a new tensor if anything is done."""
    # In place in a copy that is made once: weights of a wide mixture are large.
    out = weight.to(torch.float32, copy=rows is not None or columns is not None)
    if rows is not None:
        out.div_(rows.to(out.device)[:, None])
    return out if columns is None else out.mul_(columns.to(out.device))


def _multiply(factors: dict[str, Tensor], tensor: str, factor: Tensor) -> None:
    factors[tensor] = factors[tensor] * factor if tensor in factors else factor
