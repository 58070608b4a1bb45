"""What becomes of one block: its sites are changed, then it is cut; or it comes into another class
first.

The stream of the result may be another one by a factor, for the sake of an eps that its class has.
While a pass works, its blocks compute on the stream as it was before, with the eps that goes with
that (`chains.result`); what writes to the stream is multiplied when it is stored.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.arch.spec import BlockSpec
from compress.blocks.linear import set_linear_weight
from compress.blocks.walk import LoadedBlock
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.edits.learned import WRITERS, LinearChange, joined
from compress.edits.repair.ridge import Affine
from compress.passes.context import block_tensors
from compress.passes.ranks import Ranks
from compress.passes.structure.attention.joint_norms import look_at_norms
from compress.passes.structure.attention.landed import landed_tensors
from compress.passes.structure.attention.latents import look_at_attention
from compress.passes.structure.attention.queries import refitted_queries
from compress.passes.structure.chains import Chains, advance_source, load
from compress.passes.structure.change import ChangesBlocks, changed, cut_block
from compress.passes.structure.observe import Pair, is_plain


@dataclass(frozen=True, slots=True, eq=False)
class Rebuilt:
    """A block as the result has it. tensors: by their names there. block: with them, between the
    states of the edited chain. changes: what became of its linears."""

    tensors: dict[str, Tensor]
    block: LoadedBlock
    changes: list[LinearChange]


def rebuilt(each: ChangesBlocks, chains: Chains, turn: int) -> Rebuilt:
    """Block `turn` of the result, from the block that is read; the source's outputs are stored."""
    planned = each.planned
    assert planned.stage is not None, "the pass is no edit"
    source = advance_source(chains, turn)
    edited = load(chains.edited, planned.kept[turn], turn)
    pair = Pair(chains, source, edited, is_plain(source))
    if each.learned.land is not None:
        made = landed(each, pair, planned.result, planned.stage.config)
        return replace(made, tensors=scaled(made.block.spec, made.tensors, planned.stream))
    norms = look_at_norms(edited)
    changes = list(changed(each, pair, planned.stage.config))
    source.free()  # where no linear was changed
    edited.free()
    kept = joined([change.kept for change in changes])
    scales = norms.scales(edited, kept, each.work.ranks)
    tensors = cut_block(each, edited.spec, changes, planned.kept, scales)
    module = chains.result.fill_block(turn, tensors.__getitem__)
    spec = planned.result.spec.blocks[turn]
    block = replace(edited, spec=spec, held=module, skeleton=chains.result)
    return Rebuilt(tensors, block, changes)


def landed(
    each: ChangesBlocks, pair: Pair, into: Outline, config: Any, *, exact: bool = False
) -> Rebuilt:
    """A block in another class, refitted there, on the stream as it was. pair.chains.result: of
    that class. into: the model it comes into. exact: in fp32, whatever the checkpoint holds."""
    land, read, skeleton = each.learned.land, pair.edited, pair.chains.result
    assert land is not None, "the edit leaves the class as it is"
    evenly = each.learned.evenly(config)
    seen = look_at_attention(read, each.work.weights, each.work.ranks, evenly=evenly)
    made = landed_tensors(each.work, each.planned.source, read, seen, partial(land, config=config))
    spec = into.spec.blocks[read.spec.index]
    for name in block_tensors(spec):  # a bias that only the new class has
        made.setdefault(name, torch.zeros(into.tensors[name].shape))
    tensors = {
        name: value.to(torch.float32 if exact else TORCH_DTYPES[into.tensors[name].dtype])
        for name, value in made.items()
    }
    del seen, made  # what is seen of keys and values is as large as a block
    module = skeleton.fill_block(spec.index, tensors.__getitem__)
    block = LoadedBlock(spec, module, skeleton, read.between)
    changes, edited = list[LinearChange](), replace(pair, edited=block)
    if not exact and each.learned.requeries(config):  # where all stays, attention is as it was
        changes.append(_requeried(edited, read, into, each.work.ranks))
    read.free()
    changes += changed(each, edited, config, exact=exact)
    pair.source.free()  # where no linear was changed
    for change in changes:
        assert change.now is not None, "what writes is refitted"
        tensors[change.linear.tensor] = change.now.weight.cpu().contiguous()
        if change.now.bias is not None:
            tensors[f"{change.linear.name}.bias"] = change.now.bias.cpu()
    module = skeleton.fill_block(spec.index, tensors.__getitem__)
    return Rebuilt(tensors, replace(block, held=module), changes)


def _requeried(pair: Pair, read: LoadedBlock, into: Outline, ranks: Ranks) -> LinearChange:
    """The refitted queries of the edited block, which computes with them as they will be stored."""
    asked = refitted_queries(pair, read, into, ranks)
    assert asked.now is not None, "they are refitted"
    weight = asked.now.weight.to(TORCH_DTYPES[into.tensors[asked.linear.tensor].dtype])
    set_linear_weight(pair.edited.module, asked.linear, weight)
    return replace(asked, now=Affine(weight))


def scaled(spec: BlockSpec, tensors: dict[str, Tensor], stream: float) -> dict[str, Tensor]:
    """The tensors of a block for a stream that is multiplied."""
    writers = {x.name for x in spec.linears if x.role in WRITERS}
    return {
        name: value * stream if name.rpartition(".")[0] in writers else value
        for name, value in tensors.items()
    }
