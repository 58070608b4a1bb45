"""An edit that leaves everything must change nothing: looked at on the first block, before work."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from compress.arch.forward.norms import StreamNorms, stream_norms
from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, LoadedBlock, Passage, TokenBatch, token_batches
from compress.checkpoint.outline import outline_from
from compress.edits import EDITS
from compress.edits.repair.rotation import Basis, channels, principal
from compress.errors import CheckpointError
from compress.passes.context import block_tensors
from compress.passes.structure.chains import Chains, load, onto
from compress.passes.structure.change import LearnedPass, changed, cut_block
from compress.passes.structure.find_basis import kind_of, pooled, streams_of
from compress.passes.structure.narrow_block import NarrowBlock, Turn, narrowed, turned
from compress.passes.structure.observe import Pair, is_plain
from compress.passes.structure.rebuild import landed
from compress.passes.structure.streams import StreamNorm, readings, unscaled

# What rounding in fp32 leaves of the output; sums of 2,048 tokens and a solve leave 1e-6 of it.
BOUND = 1e-5
ROWS = 4  # at least two, one of which is held out
TOKENS = 2048
KEYS = 256  # numbers of keys, of all heads together, that come into another class there, at most


def check_identity(each: LearnedPass, ids: Tensor) -> float:
    """Change the first block in fp32 by the edit at zero compression.

    ids: [rows, length], calibration tokens. Returns the difference of its outputs as a share of
    them; CheckpointError when that is more than BOUND.
    """
    work, first = each.work, each.work.weights.spec.blocks[0]
    rows = max(2, min(ROWS, len(ids), TOKENS // ids.shape[1]))
    batches = token_batches(ids[:rows], None, 1)
    skeleton = Skeleton(
        work.checkpoint.config, work.weights.spec, dtype=torch.float32, device=work.device
    )
    chain = Chain(skeleton, work.weights, batches, _in_memory(batches, work.weights.spec.hidden))
    chain.embed()
    source = load(chain, first.index, 0)
    look = _whole(each)
    if look is _landed_whole:
        _leave_heads(source)
    source.run_on()
    chains = Chains(chain, chain, skeleton, held=rows - 1, origin=(0, 1))
    share = look(each, chains, source)
    if not share <= BOUND:
        raise CheckpointError(
            f"at zero compression the stage changes what block {first.index} gives by {share:.1g}"
            f" of it, more than {BOUND:g}: it would damage this decoder; leave the stage out"
        )
    return share


def _whole(each: LearnedPass) -> Callable[[LearnedPass, Chains, LoadedBlock], float]:
    """What looks at an edit of this kind."""
    if each.planned.narrows:
        return _turned_whole
    return _cut_whole if each.learned.land is None else _landed_whole


def _in_memory(batches: Sequence[TokenBatch], hidden: int) -> tuple[HiddenStates, HiddenStates]:
    shapes = [(*batch.ids.shape, hidden) for batch in batches]
    one, other = (HiddenStates(Path(), shapes, torch.float32, budget=1 << 62) for _ in range(2))
    return one, other


def _cut_whole(each: LearnedPass, chains: Chains, source: LoadedBlock) -> float:
    """What an edit of blocks changes when all of them stays."""
    pair = Pair(chains, source, load(chains.edited, source.spec.index, 0), is_plain(source))
    changes = list(changed(each, pair, each.learned.neutral(each.config), exact=True))
    tensors = cut_block(each, source.spec, changes, None)
    held = chains.result.fill_block(source.spec.index, tensors.__getitem__)
    return _difference(replace(pair.edited, held=held), None)


def _landed_whole(each: LearnedPass, chains: Chains, source: LoadedBlock) -> float:
    """What another class changes when all of keys and values stays; with the source's eps, which a
    stream that is scaled by a power of two only comes near to."""
    work, source_model = each.work, each.planned.source
    read = load(chains.edited, source.spec.index, 0)
    heads = _leave_heads(read)
    assert each.learned.of_heads is not None, "it comes with land"
    config = each.learned.of_heads(source_model, each.config, heads)
    draft = EDITS[each.method].plan(source_model, config)
    whole, _ = outline_from(draft.config, draft.entries, work.plan.recipe.output.shard_size)
    before, after = (stream_norms(x.config, x.spec).eps for x in (source_model, whole))
    computing = unscaled(whole.config, whole.spec, math.sqrt(after / before))
    skeleton = Skeleton(computing, whole.spec, dtype=torch.float32, device=work.device)
    pair = Pair(replace(chains, result=skeleton), source, read, is_plain(source))
    made = landed(each, pair, whole, config, exact=True)
    return _difference(made.block, None)


def _leave_heads(block: LoadedBlock) -> int:
    """All heads of keys and values but the first few become 0; how many are left.

    With all keys rotated every head of queries has numbers for each of them: in a model of 7B that
    would be 4 GB of queries alone.
    """
    sizes = block.spec.sizes
    left = max(1, min(sizes.kv_heads, KEYS // sizes.key_width))
    widths = {"k": sizes.key_width, "v": sizes.value_width}
    for linear in block.spec.linears:
        if left < sizes.kv_heads and linear.role in widths:
            module = block.module.get_submodule(linear.module)
            for part in module.parameters(recurse=False):
                part.data = part.data.clone()  # what was read may be the file itself
                part.data[left * widths[linear.role] :] = 0
    return left


def _turned_whole(each: LearnedPass, chains: Chains, source: LoadedBlock) -> float:
    """What another basis of the stream changes when all directions stay: of the first block's own
    stream."""
    work, block, chain = each.work, source.spec, chains.source
    norms, kind = stream_norms(work.checkpoint.config, work.weights.spec), kind_of(each)
    read = {name: work.checkpoint.read(name, check_finite=True) for name in block_tensors(block)}
    basis = _whole_basis(each, chains, source, norms)
    turn = Turn(basis, kind == "pca", norms, None, each.config.repair, exact=True)
    into, states = basis.into.float(), _in_memory(chains.batches, work.weights.spec.hidden)
    for batch in chains.batches:
        stream = chain.entering(0).read(batch.index).to(into.device)
        states[0].write(batch.index, onto(into, stream))
    tensors = turned(block, read, turn)
    module = chains.result.fill_block(block.index, tensors.__getitem__)
    between = Passage(chains.batches, *states)
    loaded = LoadedBlock(block, module, chains.result, between)
    pair = Pair(replace(chains, basis=into), source, loaded, is_plain(source))
    narrowed(NarrowBlock(block, read, loaded, tensors), turn, pair, work.ranks)
    return _difference(replace(loaded, between=replace(between, target=source.target)), into)


def _whole_basis(
    each: LearnedPass, chains: Chains, source: LoadedBlock, norms: StreamNorms
) -> Basis:
    """All directions of the stream at the norms of one block, or all channels."""
    hidden, device = each.work.weights.spec.hidden, each.work.device
    if kind_of(each) == "channels":
        return channels(torch.ones(hidden, device=device), hidden)
    plain = [StreamNorm(norms) for _ in readings(source.spec, norms)]
    gram = pooled(streams_of(chains, source, plain), hidden, each.work.ranks, device)
    return principal(gram, hidden)


def _difference(after: LoadedBlock, into: Tensor | None) -> float:
    """Norm of what a block gives beside its stored outputs, as a share of theirs. into: the basis
    that the block is in; None for that of the outputs."""
    change, whole = 0.0, 0.0
    for entering in after.inputs():
        with torch.no_grad():
            out = after.run(entering)
        stored = onto(into, after.target.read(entering.index).to(out.device))
        change += float((out - stored).double().square().sum())
        whole += float(stored.double().square().sum())
    return math.sqrt(change / whole) if whole > 0 else 0.0
