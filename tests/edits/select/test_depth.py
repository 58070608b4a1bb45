"""Scores of blocks against a plain transformers model with blocks deleted, by brute force."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, token_batches, walk
from compress.checkpoint import Checkpoint
from compress.edits.prune_depth import By
from compress.edits.select.depth import (
    REMOVALS,
    angular,
    influence,
    least,
    least_run,
    losses_without,
    remove_by_loss,
)
from compress.errors import DataError
from compress.evaluation.chains import divergences
from compress.formats import open_weights
from helpers import tiny_models

BLOCKS, ROWS, LENGTH = 4, 5, 12
EVERY = list(range(BLOCKS))
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": BLOCKS},
    "gemma3_text": {
        "num_hidden_layers": BLOCKS,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
FAMILIES = ("llama", "gpt2", "gemma3_text")


@cache
def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@dataclass(frozen=True)
class Pair:
    """Chains of a tiny model over rows of which one ends in padding, and the model itself."""

    model: Path
    folder: Path

    def chain(self, name: str = "chain", dtype: torch.dtype = torch.float32) -> Chain:
        weights = open_weights(Checkpoint.open(self.model))
        skeleton = Skeleton(weights.checkpoint.config, weights.spec, dtype=dtype)
        return Chain(skeleton, weights, self.batches, (self.scratch(name),))

    def source(self) -> Chain:
        chain = self.chain("source")
        chain.embed()
        for block in walk(chain):
            block.run_on()
        return chain

    @property
    def batches(self) -> Any:
        return token_batches(self.ids, self.mask, 2)

    @property
    def ids(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(1, tiny_models.VOCAB, (ROWS, LENGTH), generator=generator)

    @property
    def mask(self) -> Tensor:
        mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
        mask[1, 7:] = False
        return mask

    def scratch(self, name: str) -> HiddenStates:
        shapes = [(*batch.ids.shape, 64) for batch in self.batches]
        return HiddenStates(self.folder / name, shapes, torch.float32, budget=0)

    def plain(self, kept: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Of transformers' model with only these blocks, over real tokens: what enters each block
        and what leaves the last, and log-probabilities."""
        model = copy.deepcopy(loaded(self.model))
        stack = model.transformer if hasattr(model, "transformer") else model.model
        name = "h" if hasattr(stack, "h") else "layers"
        blocks = getattr(stack, name)
        setattr(stack, name, nn.ModuleList([blocks[i] for i in kept]))
        if getattr(model.config, "layer_types", None) is not None:
            types = model.config.layer_types
            model.config.layer_types = [types[i] for i in kept]
        model.config.num_hidden_layers = len(kept)
        states: list[Tensor] = []

        def entering(module: nn.Module, args: Any, kwargs: Any) -> None:
            states.append((args[0] if args else kwargs["hidden_states"])[self.mask])

        def leaving(module: nn.Module, args: Any, out: Any) -> None:
            states.append((out[0] if isinstance(out, tuple) else out)[self.mask])

        left = getattr(stack, name)
        for block in left:
            block.register_forward_pre_hook(entering, with_kwargs=True)
        left[-1].register_forward_hook(leaving)
        with torch.no_grad():
            logits = model(self.ids, attention_mask=self.mask.long(), use_cache=False).logits
        return [x.double() for x in states], logits[self.mask].double().log_softmax(-1)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Path] = {}

    def get(family: str) -> Pair:
        if family not in made:
            options = OWN.get(family, {"num_hidden_layers": BLOCKS})
            folder = tmp_path_factory.mktemp(family)
            made[family] = tiny_models.make(family, folder, dtype="fp32", **options)
        return Pair(made[family], tmp_path_factory.mktemp("states"))

    return get


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    return pairs(request.param)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))


@pytest.mark.parametrize("kept", [EVERY, [0, 3]])
def test_influence_and_angles_are_those_of_the_plain_model(pair: Pair, kept: list[int]) -> None:
    states, _ = pair.plain(kept)
    wanted = [1 - cosine(x, y).mean() for x, y in pairwise(states)]
    chain = pair.chain()
    found = influence(chain, kept, pair.scratch)
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-7, rtol=1e-5)
    for run in sorted({1, 2, len(kept)}):
        ends = zip(states, states[run:], strict=False)
        angles = [(cosine(x, y).clamp(-1, 1).arccos() / math.pi).mean() for x, y in ends]
        got = angular(chain, kept, run, pair.scratch)
        torch.testing.assert_close(got, torch.stack(angles), atol=1e-6, rtol=1e-5)
    assert list(pair.folder.iterdir()) == [pair.folder / "chain"]


def without(kept: Sequence[int], block: int) -> list[int]:
    return [index for index in kept if index != block]


def test_each_loss_is_that_of_the_model_without_the_block(pair: Pair) -> None:
    source, (_, log_p) = pair.source(), pair.plain(EVERY)
    kept = [0, 1, 3]

    def kl(left: Sequence[int]) -> float:
        log_q = pair.plain(left)[1]
        return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())

    whole, found = losses_without(
        pair.chain(), kept, pair.scratch, lambda chains: divergences(source, chains)
    )
    assert whole == pytest.approx(kl(kept), rel=1e-4)
    assert list(found) == kept
    for block, loss in found.items():
        assert loss == pytest.approx(kl(without(kept, block)), rel=1e-4)


def test_of_the_source_nothing_is_lost(pair: Pair) -> None:
    source = pair.source()
    assert divergences(source, [source]) == [pytest.approx(0, abs=1e-12)]
    assert divergences(source, []) == []


def test_blocks_go_one_after_another(pairs: Callable[[str], Pair]) -> None:
    """The same as brute force on each step, and going on from the middle changes nothing."""
    pair = pairs("llama")
    source, (_, log_p) = pair.source(), pair.plain(EVERY)
    removed = list(
        remove_by_loss(pair.chain(), 2, pair.scratch, lambda found: divergences(source, found))
    )
    left = EVERY
    for removal in removed:
        losses = {}
        for block in left:
            log_q = pair.plain(without(left, block))[1]
            losses[block] = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        assert removal.block == min(losses, key=lambda block: losses[block])
        assert removal.loss == pytest.approx(losses[removal.block], rel=1e-4)
        left = without(left, removal.block)
    for before, removal in pairwise(removed):
        assert removal.whole == before.loss
    (again,) = remove_by_loss(
        pair.chain(),
        1,
        pair.scratch,
        lambda found: divergences(source, found),
        kept=without(EVERY, removed[0].block),
    )
    assert again == removed[1]


def test_what_is_before_a_removed_block_is_run_once(
    pairs: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, loads, runs = pairs("llama"), [], []
    load, run = Skeleton.load_block, Skeleton.run_block

    def counted(self: Skeleton, weights: Any, index: int) -> nn.Module:
        loads.append(index)
        return load(self, weights, index)

    def ran(self: Skeleton, block: nn.Module, index: int, *rest: Any) -> Tensor:
        runs.append(index)
        return run(self, block, index, *rest)

    monkeypatch.setattr(Skeleton, "load_block", counted)
    monkeypatch.setattr(Skeleton, "run_block", ran)
    stores: list[str] = []

    def scratch(name: str) -> HiddenStates:
        stores.append(name)
        return pair.scratch(name)

    losses_without(pair.chain(), EVERY, scratch, lambda chains: [0.0] * len(chains))
    assert loads == EVERY
    assert len(runs) == len(pair.batches) * BLOCKS * (BLOCKS + 1) // 2
    assert len(stores) == BLOCKS
    assert sorted(x.name for x in pair.folder.iterdir()) == ["chain"]


def given(*losses: float) -> Callable[[Sequence[Chain]], Sequence[float]]:
    return lambda chains: (0.0, *losses)


@pytest.mark.parametrize(
    ("losses", "gone"),
    [
        ((3, 2, 1, 2), 2),
        ((1, 1, 1, 1), 0),
        ((math.nan, math.inf, 5, 6), 2),
        ((math.nan,) * BLOCKS, 0),
    ],
)
def test_equals_and_losses_that_are_no_numbers(
    pairs: Callable[[str], Pair], losses: tuple[float, ...], gone: int
) -> None:
    pair = pairs("llama")
    (removal,) = remove_by_loss(pair.chain(), 1, pair.scratch, given(*losses))
    assert removal.block == gone


def test_the_lowest_scores_go_first() -> None:
    scores = torch.tensor([0.5, 0.1, 0.3, 0.1, 0.2], dtype=torch.float64)
    assert least(scores, [0, 2, 3, 5, 6], 3) == (2, 5, 6)
    assert least_run(scores, [0, 2, 3, 5, 6, 7, 8]) == (2, 3, 5)
    assert least_run(torch.tensor([0.5]), [4, 5]) == (4, 5)


def test_the_table_of_removals_goes_by_what_it_names(pairs: Callable[[str], Pair]) -> None:
    assert set(REMOVALS) == set(get_args(By))
    pair = pairs("llama")
    chain, source = pair.chain(), pair.source()

    def losses(chains: Sequence[Chain]) -> list[float]:
        return divergences(source, chains)

    found = {by: row(chain, 2, pair.scratch, losses) for by, row in REMOVALS.items()}
    assert found == {
        "loss": tuple(x.block for x in remove_by_loss(chain, 2, pair.scratch, losses)),
        "influence": least(influence(chain, EVERY, pair.scratch), EVERY, 2),
        "angular": least_run(angular(chain, EVERY, 2, pair.scratch), EVERY),
    }
    assert all(len(set(gone)) == 2 for gone in found.values())


def test_states_that_are_not_finite_are_refused(
    pairs: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs("llama")
    chain = pair.chain()
    embed = chain.skeleton.embed

    def huge(*args: Any) -> Tensor:
        return embed(*args) * float("inf")

    monkeypatch.setattr(chain.skeleton, "embed", huge)
    with pytest.raises(DataError, match=r"model\.layers\.0 makes numbers .* that are not finite"):
        influence(chain, EVERY, pair.scratch)
    assert [x.name for x in pair.folder.iterdir()] == ["chain"]
