"""Bytes of a training against what torch really keeps."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.checkpoint.outline import Outline, outline_of
from compress.checkpoint.reader import Checkpoint
from compress.distill.head import CHUNK_ELEMENTS
from compress.distill.masters import Masters
from compress.distill.memory import MicroBatch, adapter_shapes, all_shapes, block_bytes, model_bytes
from compress.distill.optimizer import OPTIMIZERS, OptimizerName, make, state_tensors
from compress.distill.student import WholeModel
from compress.distill.trained import adapters, whole
from distill.conftest import Pair

BATCH = MicroBatch(rows=3, length=40)


def outline(pair: Pair) -> Outline:
    return outline_of(Checkpoint.open(pair.model))


def kept_by_autograd(decoder: WholeModel) -> int:
    """Bytes behind one forward, without the weights."""
    sizes: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in decoder.model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(1, 200, (BATCH.rows, BATCH.length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = decoder.hidden(ids)
    assert hidden.requires_grad
    return sum(sizes.values())


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma2"])
def test_activations_are_about_what_autograd_keeps(
    family: str, make_pair: Callable[..., Pair]
) -> None:
    pair = make_pair(family)
    decoder = pair.teacher()
    trained = whole(decoder.model, decoder.names)
    shapes = [tuple(p.shape) for p in trained.parameters.values()]
    assert sorted(shapes) == sorted(all_shapes(outline(pair)))
    estimate = model_bytes(outline(pair), shapes, BATCH).activations
    assert 0.85 < estimate / kept_by_autograd(decoder) < 1.6
    decoder.checkpoint_blocks()
    less = model_bytes(outline(pair), shapes, MicroBatch(3, 40, checkpointed=True)).activations
    assert less > kept_by_autograd(decoder)  # the block that is computed again comes on top


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_holds_what_was_said(pair: Pair, name: OptimizerName) -> None:
    decoder = pair.teacher()
    named = whole(decoder.model, decoder.names).parameters
    parameters = list(named.values())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(name, named, 1e-3)
    optimizer.step()
    held = [v for k, v in state_tensors(optimizer).items() if not k.endswith(".step")]
    needs = model_bytes(outline(pair), [tuple(p.shape) for p in parameters], BATCH, name)
    assert needs.optimizer == sum(value.nbytes for value in held)
    assert needs.gradients == needs.best == sum(4 * p.numel() for p in parameters)
    assert needs.weights == needs.gradients


def test_16_bits_add_the_weights_in_fp32(pair: Pair) -> None:
    shapes = all_shapes(outline(pair))
    count = sum(math.prod(shape) for shape in shapes)
    wide, half = (model_bytes(outline(pair), shapes, BATCH, width=width) for width in (4, 2))
    masters = Masters.of({"x": torch.nn.Parameter(torch.zeros(count, dtype=torch.bfloat16))})
    both = (masters.parameters["x"], masters.weights["x"])
    assert half.weights == sum(weight.nbytes for weight in both) == wide.weights * 3 // 2
    assert half.gradients == 6 * count == wide.gradients * 3 // 2
    assert replace(half, weights=0, gradients=0) == replace(wide, weights=0, gradients=0)
    blocks = [block_bytes(outline(pair), BATCH, width=width) for width in (4, 2)]
    assert blocks[1].weights == blocks[0].weights * 3 // 2


def test_adapters_need_little(pair: Pair) -> None:
    decoder = pair.teacher()
    made = adapters(decoder.model, decoder.linears, 4, 0).parameters.values()
    shapes = adapter_shapes(outline(pair).spec, 4)
    assert sorted(shapes) == sorted(tuple(x.shape) for x in made)
    small = model_bytes(outline(pair), shapes, BATCH)
    assert small.total < model_bytes(outline(pair), all_shapes(outline(pair)), BATCH).total


def test_a_resident_teacher_counts_and_a_block_is_the_least(pair: Pair) -> None:
    model = outline(pair)
    alone = model_bytes(model, all_shapes(model), BATCH)
    taught = model_bytes(model, all_shapes(model), BATCH, teacher=model)
    assert taught.total - alone.total == taught.teacher > taught.weights
    assert block_bytes(model, BATCH).total < alone.total - 4 * CHUNK_ELEMENTS
