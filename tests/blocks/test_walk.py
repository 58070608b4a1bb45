"""One walk for all: with and without gradients, alone and beside a teacher, from any block on."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, LoadedBlock, TokenBatch, token_batches, walk
from compress.checkpoint.reader import Checkpoint
from compress.formats import Weights, open_weights
from compress.verbs import run
from helpers import tiny_models
from helpers.short_runs import recipe, text_source

ROWS, LENGTH = 5, 12
FAMILIES = ("llama", "mixtral", "gpt2", "gemma2")


@dataclass(frozen=True)
class Maker:
    """Chains over one set of rows through one tiny model."""

    model: Path
    folder: Path

    def chain(self, name: str, stores: int, *, budget: int | None = None) -> Chain:
        weights = open_weights(Checkpoint.open(self.model))
        skeleton = Skeleton(weights.checkpoint.config, weights.spec, dtype=torch.float32)
        batches = self.batches()
        shapes = [(*batch.ids.shape, weights.spec.hidden) for batch in batches]
        paths = (self.folder / f"{name}.{i}" for i in range(stores))
        states = (HiddenStates(path, shapes, torch.float32, budget=budget) for path in paths)
        chain = Chain(skeleton, weights, batches, tuple(states))
        chain.embed()
        return chain

    def batches(self) -> tuple[TokenBatch, ...]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, tiny_models.VOCAB, (ROWS, LENGTH), generator=generator)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[1, 7:] = False
        return token_batches(ids, mask, 2)

    def stored(self, states: HiddenStates) -> list[Tensor]:
        return [states.read(index) for index in range(len(self.batches()))]

    def plain(self) -> list[list[Tensor]]:
        """What enters each block, and what leaves the last."""
        chain = self.chain("plain", 1, budget=1 << 20)
        found = [self.stored(chain.entering(0))]
        for block in walk(chain):
            block.run_on()
            found.append(self.stored(block.target))
        return found


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    return Maker(tiny_models.make("llama", tmp_path / "model", dtype="fp32"), tmp_path)


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(map(torch.equal, found, wanted))


def test_two_stores_keep_what_entered(maker: Maker) -> None:
    """A walk that ends inside a block goes on from there, to the same bits."""
    wanted = maker.plain()
    chain = maker.chain("hidden", 2)
    blocks = chain.weights.spec.blocks
    first, dying = walk(chain), blocks[1]
    next(first).run_on()
    half = next(first)
    assert half.spec is dying
    entering = next(iter(half.inputs()))
    half.target.write(entering.index, half.run(entering) * 0.5)
    assert equal(maker.stored(half.between.source), wanted[1])
    for block in walk(chain, blocks[1:]):
        block.run_on()
        assert equal(maker.stored(block.target), wanted[block.spec.index + 1])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of all blocks that are loaded; an assertion where one before is still in memory."""
    indices: list[int] = []
    alive: list[weakref.ref[nn.Module]] = []
    load = Skeleton.load_block

    def watched(self: Skeleton, weights: Weights, index: int) -> nn.Module:
        assert [ref for ref in alive if ref() is not None] == []
        module = load(self, weights, index)
        indices.append(index)
        alive.append(weakref.ref(module))
        return module

    monkeypatch.setattr(Skeleton, "load_block", watched)
    return indices


def test_one_block_is_in_memory(maker: Maker, loaded: list[int]) -> None:
    """Also where the loop's variable still has the one before, as it always does."""
    for block in walk(maker.chain("hidden", 1, budget=1 << 20)):
        block.run_on()
    assert loaded == [0, 1]
    with pytest.raises(AssertionError, match="freed"):
        _ = block.module


def test_all_of_a_run_holds_one_block(
    maker: Maker, loaded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sensitivities, calibration, and evaluation of source, result and plain rounding."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(maker.folder / "cache"))
    schemes = [{"bits": bits, "group_size": 32} for bits in (3, 4, 8)]
    target = {"bits_per_weight": 4.5}
    stage = {"method": "gptq", "candidates": schemes, "target": target, "sensitivity": "kl"}
    texts = [{"text": str(maker.folder / "words.txt")}]
    asked = recipe(stage, calibration=text_source(maker.folder), evaluation={"texts": texts})
    run(asked, maker.model, maker.folder / "out")
    assert loaded == [0, 1] * 5


def test_no_block_is_left_without_passing_on(maker: Maker) -> None:
    for store in (None, False):
        steps = walk(maker.chain("hidden", 2))
        block = next(steps)
        if store is not None:
            block.run_on(store=store)
        with pytest.raises(AssertionError, match=r"no output of model\.layers\.0"):
            next(steps)
    steps = walk(maker.chain("student", 2), teacher=maker.chain("teacher", 2))
    next(steps).run_on()
    with pytest.raises(AssertionError, match="no output of"):
        next(steps)


def damage(block: LoadedBlock) -> None:
    """What a compression does to a block's matrices."""
    generator = torch.Generator().manual_seed(block.spec.index)
    with torch.no_grad():
        for parameter in block.module.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.2 * parameter.std() * noise)


def losses(block: LoadedBlock) -> Iterator[Tensor]:
    """Squared difference from what leaves the teacher's block, by batch."""
    assert block.teacher is not None
    for entering in block.inputs():
        wanted = block.teacher.target.read(entering.index)
        yield (block.run(entering) - wanted)[entering.mask].square().mean()


def total(block: LoadedBlock) -> float:
    return sum(float(loss.detach()) for loss in losses(block))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_learns_from_its_teacher(family: str, tmp_path: Path) -> None:
    """Block after block: damaged, one step of descent against what the teacher's block gives, run
    on. The teacher's states are those of a walk by itself, to the bit."""
    maker = Maker(tiny_models.make(family, tmp_path / "model", dtype="fp32"), tmp_path)
    wanted = maker.plain()
    student, teacher = maker.chain("student", 2), maker.chain("teacher", 2)
    stops = 0
    for block in walk(student, teacher=teacher, gradients=True):
        assert block.teacher is not None
        assert not any(p.requires_grad for p in block.teacher.module.parameters())
        block.teacher.run_on()
        block.teacher.free()  # its states are enough, and memory is for the optimiser
        damage(block)
        before = total(block)
        descend(block)
        assert 0 < total(block) < before
        block.run_on()
        index = block.spec.index
        assert equal(maker.stored(block.teacher.between.source), wanted[index])
        assert equal(maker.stored(block.teacher.target), wanted[index + 1])
        assert not equal(maker.stored(block.target), wanted[index + 1])
        stops += 1
    assert stops == len(wanted) - 1
    assert len({path.name for path in tmp_path.glob("*.[01]")} - {"plain.0"}) == 4


def descend(block: LoadedBlock) -> None:
    """One step along the gradient of all batches."""
    for loss in losses(block):
        loss.backward()
    moved = [p for p in block.module.parameters() if p.grad is not None]
    norm = torch.stack([p.grad.norm() for p in moved if p.grad is not None]).norm()
    with torch.no_grad():
        for parameter in moved:
            assert parameter.grad is not None
            parameter.sub_(0.01 * parameter.grad / norm)
            parameter.grad = None


def test_gradients_are_for_those_who_ask(maker: Maker) -> None:
    """A plain walk records none; one with gradients gives those of the whole block's graph, and
    what a state that asks for them passes back to the block before."""
    plain = next(walk(maker.chain("plain", 2)))
    assert all(not plain.run(x).requires_grad for x in plain.inputs())
    block = next(walk(maker.chain("student", 2), gradients=True))
    entering = next(iter(block.inputs()))
    out = block.run(entering)
    assert equal([out.detach()], [plain.run(entering)])
    out.sum().backward()
    assert all(p.grad is not None for p in block.module.parameters())
    block.run_on()
    hidden = entering.hidden.clone().requires_grad_()
    context = block.skeleton.context(maker.batches()[0].ids, entering.mask)
    passed = plain.skeleton.run_block(plain.module, 0, hidden, context)
    (grad,) = torch.autograd.grad(passed.sum(), hidden)
    assert grad.shape == hidden.shape
    assert float(grad.abs().sum()) > 0
    with torch.no_grad():
        assert not block.run(entering).requires_grad
