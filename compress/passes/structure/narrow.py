"""The units of a pass that narrows the residual stream.

It first looks at all layers (`find_basis`). Then the model is written part by part for the narrow
stream, and run as it was written: embeddings, block after block (`narrow_block`), final norm and
head. Memory holds a block of the source's chain, one that is read and one that is written.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from compress.arch.forward.norms import stream_norms
from compress.arch.spec import BlockSpec
from compress.blocks.walk import LoadedBlock, Passage
from compress.edits.repair.ridge import Affine, Refit, refit
from compress.edits.repair.rotation import norm_gain, reader_map, rotated_rows
from compress.formats.weights import DenseWeights
from compress.passes.context import block_tensors, record_unit
from compress.passes.copying import copy, row_ranges
from compress.passes.ranks import decided
from compress.passes.structure.chains import Chains, advance_source, embed, onto
from compress.passes.structure.change import LearnedPass, record_written
from compress.passes.structure.files import BASIS
from compress.passes.structure.find_basis import basis_of_pass, final_norm, kind_of
from compress.passes.structure.narrow_block import NarrowBlock, Turn, fact_of, narrowed, turned
from compress.passes.structure.observe import Pair, is_plain
from compress.passes.structure.streams import StreamNorm
from compress.passes.units import EMBED, HEAD, OUTSIDE, block_unit
from compress.report.schema import LinearRepair
from compress_calibration.moments import Moments, MomentsAccumulator


def narrowing_units(each: LearnedPass, chains: Chains) -> Iterator[str]:
    """Carry out every unit that the journal does not have as finished; yield its name."""
    work, done = each.work, set(each.work.journal.units)
    basis = basis_of_pass(each, chains)
    if BASIS not in done:
        yield BASIS
    norms = stream_norms(work.checkpoint.config, work.weights.spec)
    folds = kind_of(each) == "pca" and not basis.is_whole
    turn = Turn(basis, folds, norms, chains.basis, each.config.repair)
    chains = _narrow_chains(each, chains, turn)
    if OUTSIDE not in done:
        _outside(each, turn)
        yield OUTSIDE
    if EMBED not in done:
        embed(chains)
        record_unit(work, EMBED, {})
        yield EMBED
    for block in work.weights.spec.blocks:
        if block_unit(block.index) not in done:
            _block(each, chains, turn, block)
            yield block_unit(block.index)
    if HEAD not in done:
        _head(each, chains, turn)
        yield HEAD


def _narrow_chains(each: LearnedPass, chains: Chains, turn: Turn) -> Chains:
    """The chains with the result as the edited model: what is written of it so far."""
    work, result = each.work, each.planned.result
    config, folder = dict(result.config), work.writer.folder
    written = replace(
        work.checkpoint, path=folder, config=config, tensors=result.tensors, seal=None
    )
    weights = DenseWeights(written, result.spec)
    into = turn.basis.into.float()
    given = into if turn.given is None else onto(into, turn.given)
    edited = replace(chains.edited, skeleton=chains.result, weights=weights)
    return replace(chains, edited=edited, basis=given)


def _outside(each: LearnedPass, turn: Turn) -> None:
    """Write what lies outside the blocks, but for what the last block decides."""
    work, spec, source = each.work, each.work.weights.spec, each.planned.source.tensors
    inside = {name for block in spec.blocks for name in block_tensors(block)}
    norm = set(_norm_names(each))
    narrow = {name for name, _ in spec.outside} - norm - {spec.head}
    others = [name for name in source if name not in inside | narrow | norm | {spec.head}]
    copy(work.checkpoint, work.writer, others)
    scale = turn.norms.embedding_scale / _result_scale(each)
    for name in narrow:
        factor = scale if name == spec.embedding else 1.0
        for start, stop in row_ranges(source[name].shape):
            rows = work.checkpoint.read_rows(name, start, stop, check_finite=True)
            new = factor * rotated_rows(rows.to(work.device), turn.basis)
            work.writer.write_rows(name, start, new.to(rows.dtype))
    record_written(each, OUTSIDE, [*others, *sorted(narrow)])


def _result_scale(each: LearnedPass) -> float:
    """What the result multiplies its embeddings by."""
    return stream_norms(each.planned.result.config, each.planned.result.spec).embedding_scale


def _norm_names(each: LearnedPass) -> list[str]:
    """Tensors of the final norm, its weight first."""
    weight = each.work.weights.spec.final_norm
    assert weight is not None, "a family of the tables has a final norm"
    bias = f"{weight.removesuffix('.weight')}.bias"
    return [weight, *([bias] if bias in each.work.checkpoint.tensors else [])]


def _block(each: LearnedPass, chains: Chains, turn: Turn, block: BlockSpec) -> None:
    """Write one block for the narrow stream, and record it; leave the states behind it."""
    work, index = each.work, block.index
    source = advance_source(chains, index)
    read = {x: work.checkpoint.read(x, check_finite=True) for x in block_tensors(block)}
    tensors = turned(block, read, turn)
    chain = chains.edited
    between = Passage(chain.batches, chain.entering(index), chain.entering(index + 1))
    module = chains.result.fill_block(index, tensors.__getitem__)
    spec = each.planned.result.spec.blocks[index]
    loaded = LoadedBlock(spec, module, chains.result, between)
    pair = Pair(chains, source, loaded, is_plain(source))
    facts = narrowed(NarrowBlock(block, read, loaded, tensors), turn, pair, work.ranks)
    source.free()
    loaded.run_on()
    chains.flush(index + 1)
    for name, value in tensors.items():
        if work.ranks.rank == 0:
            work.writer.write(name, value)
    record_written(each, block_unit(index), list(tensors), [asdict(x) for x in facts])


def _head(each: LearnedPass, chains: Chains, turn: Turn) -> None:
    """Write the final norm and, where it is no embedding, the head; record both."""
    work, norm = each.work, final_norm(each)
    now = _narrow_norm(norm, turn)
    sums = _final_moments(each, chains, turn, norm, now)
    fit, held = (x.over(work.ranks.sum).moments() for x in sums)
    names, facts, gain = _norm_names(each), list[LinearRepair](), 1.0
    if each.planned.result.spec.head is None:
        gain = _shared_gain(each, turn, fit + held)
    else:
        gains = norm.gain if turn.folds else None
        start = reader_map(gains, turn.basis).to(work.device)
        start = start * norm_gain(fit + held, start)
        facts += _refit_head(each, turn, start, fit, held)
        names.append(each.planned.result.spec.head)
    stored = [(now.gain, norm.how.offset)] + ([] if now.bias is None else [(now.bias, 0.0)])
    for name, (value, offset) in zip(_norm_names(each), stored, strict=True):
        assert value is not None, name
        dtype = work.checkpoint.read(name).dtype
        work.writer.write(name, (value.double() * gain - offset).to(dtype))
    record_written(each, HEAD, names, [asdict(x) for x in facts])


def _narrow_norm(norm: StreamNorm, turn: Turn) -> StreamNorm:
    """The final norm in the basis, before it is scaled."""
    assert norm.gain is not None, "a final norm of the tables has a gain"
    into = turn.basis.into.float()
    if turn.folds:
        return replace(norm, gain=torch.ones_like(into[0]))
    return replace(
        norm, gain=norm.gain @ into, bias=None if norm.bias is None else norm.bias @ into
    )


def _final_moments(
    each: LearnedPass, chains: Chains, turn: Turn, norm: StreamNorm, now: StreamNorm
) -> tuple[MomentsAccumulator, MomentsAccumulator]:
    """Moments of what the final norms give: the narrow one, and that of the model which the pass
    reads on the source's stream; of rows to fit by and of rows held out."""
    hidden, keep = turn.basis.directions.shape
    device, last = each.work.device, len(each.work.weights.spec.blocks)
    fit, held = (MomentsAccumulator.create("head", keep, hidden, device=device) for _ in range(2))
    for batch in chains.batches:
        rows = len(batch.ids)
        ours, theirs = (
            x.entering(last).read(batch.index, 0, rows).to(device)
            for x in (chains.edited, chains.source)
        )
        x, y = now.of(ours), norm.of(onto(turn.given, theirs))
        real = slice(None) if batch.mask is None else batch.mask.to(device)
        sums = held if batch.index >= chains.held else fit
        sums.add(x[real].flatten(0, -2), y[real].flatten(0, -2))
    return fit, held


def _shared_gain(each: LearnedPass, turn: Turn, moments: Moments) -> float:
    """The gain of the final norm before a head that is the embedding: of least error in logits."""
    checkpoint, name = each.work.checkpoint, each.work.weights.spec.embedding
    hidden = turn.basis.directions.shape[0]
    metric = torch.zeros(hidden, hidden, dtype=torch.float64, device=each.work.device)
    for start, stop in row_ranges(checkpoint.tensors[name].shape):
        rows = checkpoint.read_rows(name, start, stop).to(each.work.device).double()
        metric += rows.T @ rows
    scale = turn.norms.embedding_scale / _result_scale(each)
    return norm_gain(moments, turn.basis.into, metric) / scale


def _refit_head(
    each: LearnedPass, turn: Turn, start: Tensor, fit: Moments, held: Moments
) -> list[LinearRepair]:
    """Write the head for what it reads now: H M, as any reader; the report's line."""
    work, spec, target = each.work, each.work.weights.spec, each.planned.result.spec.head_linear()
    assert target is not None, "the result has a head"
    made: Refit | None = None
    if turn.repair != "none":
        made = decided(work.ranks, partial(refit, fit, held, Affine(start)))
        start = made.linear.weight
    name = spec.head or spec.embedding
    for first, stop in row_ranges(work.checkpoint.tensors[name].shape):
        rows = work.checkpoint.read_rows(name, first, stop, check_finite=True)
        new = rows.to(work.device).double() @ start.double()
        work.writer.write_rows(target.tensor, first, new.to(rows.dtype))
    return [fact_of(target.name, turn, made, held)]
