"""An edit that leaves everything must change nothing: looked at on the first block, before work."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, LoadedBlock, token_batches
from compress.errors import CheckpointError
from compress.passes.structure.chains import Chains, load
from compress.passes.structure.change import LearnedPass, changed, cut_block
from compress.passes.structure.observe import Pair, is_plain

# What rounding in fp32 leaves of the output; sums of 2,048 tokens and a solve leave 1e-6 of it.
BOUND = 1e-5
ROWS = 4  # at least two, one of which is held out
TOKENS = 2048


def check_identity(each: LearnedPass, ids: torch.Tensor) -> float:
    """Change the first block in fp32 by the edit at zero compression.

    ids: [rows, length], calibration tokens. Returns the difference of its outputs as a share of
    them; CheckpointError when that is more than BOUND.
    """
    work, first = each.work, each.work.weights.spec.blocks[0]
    rows = max(2, min(ROWS, len(ids), TOKENS // ids.shape[1]))
    batches = token_batches(ids[:rows], None, rows - 1)
    skeleton = Skeleton(
        work.checkpoint.config, work.weights.spec, dtype=torch.float32, device=work.device
    )
    shapes = [(*batch.ids.shape, work.weights.spec.hidden) for batch in batches]
    states = tuple(HiddenStates(Path(), shapes, torch.float32, budget=1 << 62) for _ in (0, 1))
    chain = Chain(skeleton, work.weights, batches, states)
    chain.embed()
    source = load(chain, first.index, 0)
    source.run_on()
    chains = Chains(chain, chain, skeleton, held=1, origin=(0, 1))
    pair = Pair(chains, source, load(chain, first.index, 0), is_plain(source))
    changes = list(changed(each, pair, each.learned.neutral(each.config)))
    tensors = cut_block(each, first, changes, None)
    after = replace(pair.edited, held=skeleton.fill_block(first.index, tensors.__getitem__))
    share = _difference(after)
    if not share <= BOUND:
        raise CheckpointError(
            f"at zero compression the stage changes what block {first.index} gives by {share:.1g}"
            f" of it, more than {BOUND:g}: it would damage this decoder; leave the stage out"
        )
    return share


def _difference(after: LoadedBlock) -> float:
    """Norm of what a block gives beside its stored outputs, as a share of theirs."""
    change, whole = 0.0, 0.0
    for entering in after.inputs():
        with torch.no_grad():
            out = after.run(entering)
        stored = after.target.read(entering.index).to(out.device)
        change += float((out - stored).double().square().sum())
        whole += float(stored.double().square().sum())
    return math.sqrt(change / whole) if whole > 0 else 0.0
