"""What stays of the residual stream: found by all layers at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.arch.forward.norms import stream_norms
from compress.blocks.capture import calls
from compress.blocks.walk import LoadedBlock
from compress.edits import EDITS
from compress.edits.narrowing import BasisKind, ByBasis
from compress.edits.repair.rotation import Basis, channels, principal
from compress.errors import DataError
from compress.passes.ranks import Ranks, decided
from compress.passes.structure.basis import keep_basis, read_basis
from compress.passes.structure.chains import Chains, load, pass_through
from compress.passes.structure.change import LearnedPass
from compress.passes.structure.files import BASIS, make_working
from compress.passes.structure.streams import StreamNorm, by_path, norm_of, readings
from compress_calibration.sequences import SequenceAccumulator
from compress_kernels import gram_

# Of a channel, beside the mean: gains of a final norm that are smaller, or below 0, count as this
# where they go into embedding and head together.
LEAST_GAIN = 0.05


def basis_of_pass(each: LearnedPass, chains: Chains) -> Basis:
    """The basis of this pass: found, and recorded, where the journal does not have it.

    chains: whose source is brought into the basis of the model that the pass reads.
    """
    work, planned, folder = each.work, each.planned, make_working(each.folder)
    if BASIS not in work.journal.units:
        keep_basis(work, planned, folder, find_basis(each, chains, kind_of(each)))
    return read_basis(work, folder, planned.name)


def kind_of(each: LearnedPass) -> BasisKind:
    """The basis that the model gets."""
    work = EDITS[each.method].work
    assert isinstance(work, ByBasis), "the edit narrows no stream"
    return work.kind(each.planned.source, each.config)


def find_basis(each: LearnedPass, chains: Chains, kind: BasisKind) -> Basis:
    """Look at the stream at all norms of the model, and choose what stays of it."""
    spec, keep = each.work.weights.spec, each.planned.result.spec.hidden
    if keep == spec.hidden:
        whole = torch.eye(keep, dtype=torch.float64, device=each.work.device)
        return Basis(whole, 1.0)
    seen = streams(each, chains)
    if kind == "channels":
        return decided(each.work.ranks, partial(channels, _scores(each, seen), keep))
    gram = pooled(seen, spec.hidden, each.work.ranks, each.work.device)
    scale = _shared_scale(each) if each.planned.result.spec.head is None else None
    return decided(each.work.ranks, partial(principal, gram, keep, scale))


@dataclass(frozen=True, slots=True, eq=False)
class StreamAt:
    """The stream of one batch at one norm: [rows, length, hidden]. place: which norm; mask: bool
    [rows, length], None without padding."""

    place: str
    stream: Tensor
    norm: StreamNorm | None
    mask: Tensor | None

    @property
    def real(self) -> Tensor | slice:
        """Index of the tokens that are no padding."""
        return slice(None) if self.mask is None else self.mask.to(self.stream.device)


def streams(each: LearnedPass, chains: Chains) -> Iterator[StreamAt]:
    """The source's stream at every norm of the model, batch by batch, from the embeddings to the
    final norm. One block is in memory."""
    norms, count = stream_norms(each.work.checkpoint.config, each.work.weights.spec), 0
    chains.source.embed()
    pass_through(chains, range(chains.origin[0]), 0)
    for block in each.work.weights.spec.blocks:
        source = load(chains.source, chains.origin[block.index], block.index)
        tensors = {
            name: each.work.checkpoint.read(name) for name, dims in block.axes if len(dims) == 1
        }
        by = [
            norm_of(norms, by_path(block, tensors), x.norm, each.work.device)
            for x in readings(block, norms)
        ]
        yield from streams_of(chains, source, by)
        source.free()
        gap = range(chains.origin[block.index] + 1, chains.origin[block.index + 1])
        pass_through(chains, gap, block.index + 1)
        count = block.index + 1
    norm = final_norm(each)
    for batch in chains.batches:
        last = chains.source.entering(count).read(batch.index, 0, len(batch.ids))
        yield StreamAt("final", chains.onto(last.to(each.work.device)), norm, batch.mask)


def streams_of(
    chains: Chains, source: LoadedBlock, norms: Sequence[StreamNorm | None]
) -> Iterator[StreamAt]:
    """Run a block of the source over all batches, and yield the stream where the model's block
    reads it. norms: of the model's block, for each place in order."""
    config, spec = source.skeleton.config, source.skeleton.spec
    paths = [x.path for x in readings(source.spec, stream_norms(config, spec))]
    for entering in source.inputs():
        with torch.no_grad(), calls(source.module, paths) as seen:
            out = source.run(entering)
        source.target.write(entering.index, out)
        for path, norm in zip(paths, norms, strict=True):
            place = f"{source.spec.prefix}.{path}"
            stream = seen[path][0].reshape(out.shape)  # opt's MLP has all tokens in one row
            yield StreamAt(place, chains.onto(stream), norm, entering.mask)


def pooled(seen: Iterator[StreamAt], hidden: int, ranks: Ranks, device: str) -> Tensor:
    """Sum of x xᵀ over the stream at all norms, each normalised without a gain: fp32."""
    gram = torch.zeros(hidden, hidden, device=device)
    for at in seen:
        assert at.norm is not None, "without norms there are no directions to choose by"
        gram_(StreamNorm(at.norm.how).of(at.stream)[at.real].flatten(0, -2), gram)
    gram = ranks.sum(gram)
    if not bool(gram.isfinite().all()):
        raise DataError("the residual stream is not finite; run with --dtype fp32")
    return gram


def _scores(each: LearnedPass, seen: Iterator[StreamAt]) -> Tensor:
    """Minitron's score of each channel, what norms give included, summed over the norms."""
    ranks, sums = each.work.ranks, dict[str, SequenceAccumulator]()
    hidden, device = each.work.weights.spec.hidden, each.work.device
    for at in seen:
        if at.place not in sums:
            sums[at.place] = SequenceAccumulator.create(at.place, hidden, device=device)
        given = at.stream.float() if at.norm is None else at.norm.of(at.stream)
        sums[at.place].add(given, at.mask)
    total = torch.zeros(hidden, dtype=torch.float64, device=device)
    for place in sums.values():
        place.total, place.square = ranks.sum(place.total), ranks.sum(place.square)
        total += place.aggregate()
    return total


def final_norm(each: LearnedPass) -> StreamNorm:
    """The norm before the head."""
    spec, checkpoint = each.work.weights.spec, each.work.checkpoint
    assert spec.final_norm is not None, "a family of the tables has a final norm"
    norms = stream_norms(checkpoint.config, spec)
    bias = f"{spec.final_norm.removesuffix('.weight')}.bias"
    names = {"norm.weight": spec.final_norm, "norm.bias": bias}
    tensors = {k: checkpoint.read(v) for k, v in names.items() if v in checkpoint.tensors}
    found = norm_of(norms, tensors, "norm", each.work.device)
    assert found is not None
    return found


def _shared_scale(each: LearnedPass) -> Tensor:
    """What channels are multiplied by where one matrix is embedding and head; see `rotation`."""
    gain = final_norm(each).gain
    assert gain is not None, "an RMS norm of the tables has a gain"
    gain = gain.double()
    return gain.clamp(min=LEAST_GAIN * float(gain.abs().mean())).sqrt()
