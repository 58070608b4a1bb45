"""One block for a narrower residual stream: turned into the basis, then refitted in the order in
which it computes.

What reads the stream is linear in what its norm gives, so one fit says all: x [hidden], what the
readers saw on the source's stream, by x' [k], what they see now, x ≈ M x'. Each reader W becomes
W M, the router and all experts of a mixture too, without a sum for each of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from compress.arch.forward.norms import StreamNorms, stream_norms
from compress.arch.spec import BlockSpec, LinearSpec
from compress.blocks.capture import calls
from compress.blocks.linear import linear_bias, linear_weight
from compress.blocks.walk import BlockInput, LoadedBlock
from compress.edits.learned import WRITERS, Site
from compress.edits.repair.ridge import Affine, Refit, refit
from compress.edits.repair.rotation import Basis, norm_gain, reader_map
from compress.edits.writers import Repair, odd, refitted
from compress.passes.ranks import Ranks, decided
from compress.passes.structure.chains import onto
from compress.passes.structure.observe import Pair, observe
from compress.passes.structure.streams import Reading, by_path, norm_of, readings
from compress.report.schema import LinearRepair
from compress_calibration.moments import Moments, MomentsAccumulator


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What turns a block into the basis. folds: whether gains of norms go into what reads them.

    norms: of the model that the pass reads. given: what brings the source's stream into that
    model's, see `Chains`. repair: what is refitted. exact: tensors stay in fp32, where the block is
    not to be stored.
    """

    basis: Basis
    folds: bool
    norms: StreamNorms
    given: Tensor | None
    repair: Repair
    exact: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class NarrowBlock:
    """A block while it is made. wide: of the model that the pass reads, with its tensors in `read`.
    loaded: of the result, which computes with `tensors`, what has been made so far."""

    wide: BlockSpec
    read: Mapping[str, Tensor]
    loaded: LoadedBlock
    tensors: dict[str, Tensor]

    def put(self, name: str, value: Tensor) -> None:
        """Replace a tensor, [as it lies on disk], rounded to what is stored."""
        value = value.to("cpu", self.tensors[name].dtype).contiguous()
        self.tensors[name] = value
        path = dict(self.wide.modules)[name]
        self.loaded.module.get_parameter(path).data.copy_(value)


def turned(block: BlockSpec, read: Mapping[str, Tensor], turn: Turn) -> dict[str, Tensor]:
    """The tensors of a block in the basis, by name, before anything is refitted."""
    into, paths, norms = turn.basis.into.cpu(), dict(block.modules), turn.norms
    maps = {
        linear.tensor: reader_map(_folded(block, read, reading, turn), turn.basis).cpu()
        for reading in readings(block, norms)
        for linear in reading.linears
    }
    before = {norms.at.attention_in, norms.at.mlp_in}
    tensors = {}
    for name, dims in block.axes:
        value = read[name].double()
        if turn.folds and paths[name].rpartition(".")[0] in before:
            value = torch.full((into.shape[1],), 1 - norms.offset)
        elif "hidden" in dims:
            dim = dims.index("hidden")
            value = (value.movedim(dim, -1) @ maps.get(name, into)).movedim(-1, dim)
        dtype = torch.float32 if turn.exact else read[name].dtype
        tensors[name] = value.to(dtype).contiguous()
    return tensors


def _folded(
    block: BlockSpec, read: Mapping[str, Tensor], reading: Reading, turn: Turn
) -> Tensor | None:
    """The gain that goes into what reads the stream; None where it stays in the norm."""
    device = str(turn.basis.directions.device)
    norm = norm_of(turn.norms, by_path(block, read), reading.norm, device)
    return norm.gain if norm is not None and turn.folds else None


def narrowed(narrow: NarrowBlock, turn: Turn, pair: Pair, ranks: Ranks) -> list[LinearRepair]:
    """Refit a turned block to its source block, in place; lines of the report. pair: with the block
    that is loaded as the edited one."""
    at, facts = turn.norms.at, []
    behind = (at.attention_out, at.mlp_out)
    for place, (role, norm) in enumerate(zip(WRITERS, behind, strict=True)):
        facts += _read_again(narrow, turn, pair, place, ranks)
        facts += _written_again(narrow, turn, pair, role, ranks)
        if norm is not None:
            _scale_norm(narrow, turn, pair, norm, ranks)
    return facts


def _read_again(
    narrow: NarrowBlock, turn: Turn, pair: Pair, place: int, ranks: Ranks
) -> list[LinearRepair]:
    """Refit the linears that read the stream at a place of the block."""
    reading = list(readings(narrow.wide, turn.norms))[place]
    fit, held = (x.over(ranks.sum).moments() for x in _seen(narrow, turn, pair, place))
    start = reader_map(_folded(narrow.wide, narrow.read, reading, turn), turn.basis)
    start = start.to(fit.gram.device)
    if reading.norm is not None:
        start = start * norm_gain(fit + held, start)
    biased = all(f"{x.name}.bias" in narrow.tensors for x in reading.linears)
    made = Affine(start, torch.zeros_like(start[:, 0]) if biased else None)
    fitted = None
    if turn.repair != "none":
        fitted = decided(ranks, partial(refit, fit, held, made))
        made = fitted.linear
    for linear in reading.linears:
        _apply_map(narrow, linear, made)
    return [fact_of(x.name, turn, fitted, held) for x in reading.linears if x.expert is None]


def _apply_map(narrow: NarrowBlock, linear: LinearSpec, made: Affine) -> None:
    """Write a reader for what it reads now: W M, and where it has a bias b + W m."""
    weight = narrow.read[linear.tensor].double()
    weight = weight.t() if linear.transposed else weight
    new = weight @ made.weight.cpu().double()
    narrow.put(linear.tensor, new.t() if linear.transposed else new)
    if made.bias is not None:
        bias = f"{linear.name}.bias"
        narrow.put(bias, narrow.read[bias].double() + weight @ made.bias.cpu().double())


def fact_of(name: str, turn: Turn, fitted: Refit | None, held: Moments) -> LinearRepair:
    """The report's line of a reader: shares are of what its norm gave in the source."""
    there, kept = turn.basis.directions.shape
    if fitted is None:
        return LinearRepair(name, kept, there)
    energy = float(held.energy.sum())
    before, after = (x / energy if energy > 0 else 0.0 for x in (fitted.before, fitted.after))
    return LinearRepair(name, kept, there, fitted.penalty, before, after, odd(fitted))


def _seen(
    narrow: NarrowBlock, turn: Turn, pair: Pair, place: int
) -> tuple[MomentsAccumulator, MomentsAccumulator]:
    """What a place of the narrow block reads, and what the model's reads on the source's stream; of
    rows to fit by and of rows held out."""
    reading, skeleton = list(readings(narrow.wide, turn.norms))[place], pair.edited.skeleton
    # Both in fp32: in bf16 a norm rounds what it gives, which would be fitted as if it were lost.
    norm, own = (
        norm_of(turn.norms, by_path(narrow.wide, x), reading.norm, skeleton.device)
        for x in (narrow.read, narrow.tensors)
    )
    theirs = list(readings(pair.source.spec, _norms(pair.source)))[place].path
    hidden, keep = turn.basis.directions.shape
    device = skeleton.device
    sums = tuple(
        MomentsAccumulator.create(reading.path, keep, hidden, device=device) for _ in range(2)
    )
    for batch, entering in zip(pair.chains.batches, pair.edited.inputs(), strict=True):
        x, _ = _call(pair.edited, reading.path, entering)
        wide, _ = _call(pair.source, theirs, pair.source.input(entering.index))
        y = onto(turn.given, wide)
        x, y = x if own is None else own.of(x), y if norm is None else norm.of(y)
        real = slice(None) if entering.mask is None else entering.mask.to(x.device)
        sums[batch.index >= pair.chains.held].add(x[real].flatten(0, -2), y[real].flatten(0, -2))
    return sums[0], sums[1]


def _norms(block: LoadedBlock) -> StreamNorms:
    """Of the model that a loaded block is of."""
    return stream_norms(block.skeleton.config, block.skeleton.spec)


def _call(block: LoadedBlock, path: str, entering: BlockInput) -> tuple[Tensor, Tensor]:
    """What a module of a block reads and gives, [rows, length, *]: opt's MLP has all tokens in one
    row."""
    with torch.no_grad(), calls(block.module, [path]) as seen:
        rows = block.run(entering).shape[:-1]
    read, gave = (x.reshape(*rows, -1) for x in seen[path])
    return read, gave


def _written_again(
    narrow: NarrowBlock, turn: Turn, pair: Pair, role: str, ranks: Ranks
) -> list[LinearRepair]:
    """Refit what writes to the stream; experts stay as they were turned, as no stream is one's
    alone."""
    block = pair.edited.spec
    linears = [x for x in block.linears if x.role == role and x.expert is None]
    if turn.repair == "none":
        return []
    # Without the drift of the stream, as where a norm lies behind: only what the block itself gave.
    held = pair if turn.repair == "drift" else replace(pair, plain=False)
    facts = []
    for linear in linears:
        biased = f"{linear.name}.bias" in narrow.tensors
        bias = linear_bias(pair.edited.module, linear).clone() if biased else None
        now = Affine(linear_weight(pair.edited.module, linear).clone(), bias)
        seen = observe(held, Site((linear,)), ranks)[linear.name]
        made = decided(ranks, partial(refitted, linear, now, seen, None, turn.repair))
        new = made.now.weight
        narrow.put(linear.tensor, new.t() if linear.transposed else new)
        if made.now.bias is not None:
            narrow.put(f"{linear.name}.bias", made.now.bias)
        facts.append(made.fact)
    return facts


def _scale_norm(narrow: NarrowBlock, turn: Turn, pair: Pair, path: str, ranks: Ranks) -> None:
    """Give a norm behind attention or MLP the gain that its fewer channels ask for."""
    square = cross = torch.zeros((), dtype=torch.float64, device=pair.edited.skeleton.device)
    for entering in pair.edited.inputs():
        _, now = _call(pair.edited, path, entering)
        _, there = _call(pair.source, path, pair.source.input(entering.index))
        real = slice(None) if entering.mask is None else entering.mask.to(now.device)
        now, there = now[real].double(), pair.chains.onto(there)[real].double()
        square, cross = square + now.square().sum(), cross + (now * there).sum()
    square, cross = ranks.sum(square), ranks.sum(cross)
    gain = float(cross / square) if float(square) > 0 else 1.0
    name = next(x for x, to in narrow.wide.modules if to == f"{path}.weight")
    offset = turn.norms.offset
    narrow.put(name, (narrow.tensors[name].double() + offset) * gain - offset)
