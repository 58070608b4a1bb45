"""How large what each column of a weight multiplies is, over a text: what its errors weigh."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from compress.arch.spec import LinearSpec
from compress.blocks.capture import collect, regroup
from compress.blocks.skeleton import Skeleton
from compress.blocks.states import HiddenStates
from compress.blocks.walk import Chain, LoadedBlock, token_batches, walk
from compress.events import Event, Progress
from compress.formats.weights import Weights
from compress.text.tokenizer import load_tokenizer
from compress_calibration.config import CalibrationConfig, SourceConfig
from compress_calibration.dataset import build

STAGE = "importance"
SAMPLES, LENGTH = 128, 512  # rows of tokens, as many as a recipe's calibration has
ROWS_AT_ONCE = 8
IN_MEMORY = 256 << 20  # bytes of hidden states; more are kept in a file


@dataclass(slots=True)
class Squares:
    """Sum of the squares of each column of an input, fp64 [K], and of how many tokens."""

    total: Tensor
    tokens: int = 0

    def add(self, x: Tensor) -> None:
        """x: [tokens, K]."""
        self.total += x.double().square().sum(0)
        self.tokens += len(x)

    def mean(self) -> Tensor:
        """fp32 [K]; 1 where nothing was seen, as of an expert that no token chose."""
        if not self.tokens:
            return torch.ones(len(self.total))
        return (self.total / self.tokens).float()


def importance_of_columns(weights: Weights, text: str, progress: Progress) -> Mapping[str, Tensor]:
    """Mean squares of what the linears in blocks read of a text, by tensor: fp32 [K].

    text: a file, or several by a pattern. Raises DataError for one that holds too little.
    """
    spec = weights.spec
    length = min(LENGTH, spec.context or LENGTH)
    config = CalibrationConfig((SourceConfig("text", text),), SAMPLES, length)
    tokenizer = load_tokenizer(weights.checkpoint.small)
    tokens = build(config, tokenizer, generate=None, vocab=spec.vocab, fewest=1)
    batches = token_batches(tokens.ids, tokens.mask, ROWS_AT_ONCE)
    skeleton = Skeleton(weights.checkpoint.config, spec, dtype=torch.float32)
    shapes = [(*batch.ids.shape, spec.hidden) for batch in batches]
    found: dict[str, Tensor] = {}
    with TemporaryDirectory() as folder:
        states = HiddenStates(Path(folder) / "hidden", shapes, torch.float32, budget=IN_MEMORY)
        chain = Chain(skeleton, weights, batches, (states,))
        chain.embed()
        for block in walk(chain):
            found |= _of_block(block, spec.family)
            block.run_on()
            progress(
                Event(
                    STAGE, f"block {block.spec.index}", block.spec.index + 1, len(spec.blocks), 0.0
                )
            )
    return found


def _of_block(block: LoadedBlock, family: str) -> dict[str, Tensor]:
    linears: tuple[LinearSpec, ...] = tuple(block.spec.linears)
    if family == "generic":
        linears = regroup(block.module, linears, block.run_first_row)
    seen = {x.shared_input: Squares(torch.zeros(x.shape[1], dtype=torch.float64)) for x in linears}
    for entering in block.inputs():
        collect(
            block.module,
            linears,
            partial(block.run, entering),
            lambda key, x: seen[key].add(x),
            mask=entering.mask,
            stop_after_last=True,
        )
    return {x.tensor: seen[x.shared_input].mean() for x in linears}
