"""A tiny teacher, a student that was damaged, and rows of random tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from compress.arch.spec import DecoderSpec
from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, TokenBatch, token_batches
from compress.checkpoint.reader import Checkpoint
from compress.distill.rows import TokenRows, all_rows
from compress.distill.student import WholeModel, open_whole
from compress.formats import open_weights
from helpers import tiny_models

ROWS, LENGTH = 12, 10  # of the tokens that walk through blocks


def batches() -> tuple[TokenBatch, ...]:
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(1, tiny_models.VOCAB, (ROWS, LENGTH), generator=drawn)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[3, 6:] = False
    return token_batches(ids, mask, 5)


def chain(model: Path) -> Chain:
    weights = open_weights(Checkpoint.open(model))
    skeleton = Skeleton(weights.checkpoint.config, weights.spec, dtype=torch.float32)
    shapes = [(*batch.ids.shape, weights.spec.hidden) for batch in batches()]
    states = (HiddenStates(Path("unused"), shapes, torch.float32, budget=1 << 20) for _ in range(2))
    made = Chain(skeleton, weights, batches(), tuple(states))
    made.embed()
    return made


@dataclass(frozen=True)
class Pair:
    """A model that is opened as often as one likes: as it is, or with noise on its linears."""

    model: Path

    def teacher(self) -> WholeModel:
        weights = open_weights(Checkpoint.open(self.model))
        config = weights.checkpoint.config
        return open_whole(weights, Skeleton(config, weights.spec, dtype=torch.float32))

    def spec(self) -> DecoderSpec:
        return open_weights(Checkpoint.open(self.model)).spec

    def student(self, noise: float = 0.05) -> WholeModel:
        damaged = self.teacher()
        drawn = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in damaged.model.parameters():
                if parameter.dim() == 2:
                    parameter += noise * torch.randn(parameter.shape, generator=drawn)
        return damaged


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    def make(family: str, *, tied: bool = False) -> Pair:
        folder = tmp_path_factory.mktemp(family) / "model"
        sizes = {"num_hidden_layers": 1} if family == "llama" else {}
        return Pair(tiny_models.make(family, folder, dtype="fp32", tied=tied, **sizes))

    return make


@pytest.fixture(scope="session")
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair("llama", tied=True)


@pytest.fixture(scope="session")
def rows() -> TokenRows:
    drawn = torch.Generator().manual_seed(3)
    return all_rows(torch.randint(1, tiny_models.VOCAB, (24, 12), generator=drawn))
