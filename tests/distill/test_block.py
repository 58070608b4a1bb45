"""A block alone against its teacher's: nearer than before or left as it was, resumed to the bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.blocks.walk import LoadedBlock, walk
from compress.distill.block import BlockScope, block_scope
from compress.distill.loop import Training, train
from compress.distill.state import State, read_state, write_state
from compress.distill.trained import whole
from distill.conftest import LENGTH, ROWS, Pair, chain

FP32 = torch.float32
SHORT = Training(steps=6, batch=4, micro=3, rate=3e-3, every=3)
HELD = 4


class KilledError(Exception):
    pass


def damaged(block: LoadedBlock, noise: float) -> None:
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in block.module.parameters():
            if parameter.dim() == 2:
                parameter += noise * torch.randn(parameter.shape, generator=drawn)


def scope(block: LoadedBlock) -> BlockScope:
    names = dict(block.spec.modules)
    return block_scope(block, whole(block.module, names), teacher_of(block).target, HELD, seed=0)


def teacher_of(block: LoadedBlock) -> LoadedBlock:
    assert block.teacher is not None
    return block.teacher


def at_first_block(pair: Pair, noise: float = 0.03) -> LoadedBlock:
    block = next(walk(chain(pair.model), teacher=chain(pair.model), gradients=True))
    teacher_of(block).run_on()
    damaged(block, noise)
    return block


def error(block: LoadedBlock) -> float:
    """Mean squared distance of real tokens, of all rows, after the block was run on."""
    found: list[Tensor] = []
    for batch in block.between.batches:
        difference = block.target.read(batch.index) - teacher_of(block).target.read(batch.index)
        found.append(difference if batch.mask is None else difference[batch.mask])
    return float(torch.cat([x.reshape(-1) for x in found]).square().mean())


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_every_block_comes_nearer_to_its_teacher(
    family: str, make_pair: Callable[..., Pair]
) -> None:
    """Along the whole walk; what enters later blocks is then what trained ones gave."""
    model = make_pair(family).model
    for block in walk(chain(model), teacher=chain(model), gradients=True):
        teacher_of(block).run_on()
        damaged(block, 0.03)
        block.run_on()
        before = error(block)
        learned = train(scope(block), SHORT, FP32)
        assert learned.end < 0.9 * learned.start
        assert {name for name, _ in block.spec.modules} == learned.weights.keys()
        block.run_on()
        assert error(block) < 0.9 * before


def test_loss_is_the_share_of_what_the_block_adds(pair: Pair) -> None:
    """A block that adds nothing has loss 1; the source's own has 0."""
    block = at_first_block(pair, noise=0.0)
    assert scope(block).held_loss() < 1e-9
    with torch.no_grad():
        for name, parameter in block.module.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    work = scope(block)
    assert work.held_loss() == pytest.approx(1.0, abs=1e-5)
    places = torch.arange(work.rows)
    assert work.tokens(places) + work.held_tokens == ROWS * LENGTH - 4


def test_killed_in_a_block_it_resumes_to_the_same_bits(pair: Pair, tmp_path: Path) -> None:
    wanted = train(scope(at_first_block(pair)), SHORT, FP32)
    path = tmp_path / "block.safetensors"

    def save(state: State) -> None:
        write_state(path, state)
        if state.standing.step == 4:
            raise KilledError

    with pytest.raises(KilledError):
        train(scope(at_first_block(pair)), SHORT, FP32, save=save)
    found = train(scope(at_first_block(pair)), SHORT, FP32, read_state(path))
    assert (found.end, found.curve) == (wanted.end, wanted.curve)
    assert all(torch.equal(value, wanted.weights[name]) for name, value in found.weights.items())


def test_block_that_diverges_stays_as_it_was(pair: Pair) -> None:
    learned = train(scope(at_first_block(pair)), replace(SHORT, rate=5.0), FP32)
    assert learned.weights == {}
    assert learned.ended.startswith("diverged")
