"""Shapes that an engine is built for: of one step with many tokens, and of steps with one."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from compress_exporters.onnx.graph.decoder import BATCH, PAST_LENGTH, SEQUENCE, TOTAL

TEXTS = 4  # at most, in one step
CHUNK = 512  # tokens of a prompt in one step, where the context holds twice as many
PAST = 1024  # tokens behind which a step with one token is fastest, where the context holds them
Shapes = Mapping[str, tuple[int, ...]]  # by the names of inputs


@dataclass(frozen=True, slots=True)
class ProfileStep:
    """texts in a step, tokens that are new in each, and tokens before them."""

    texts: int
    new: int
    past: int

    def shapes(self, inputs: list[ir.Value]) -> Shapes:
        """Of all inputs; lengths add up, as the graph needs it."""
        sizes = {
            BATCH: self.texts,
            SEQUENCE: self.new,
            PAST_LENGTH: self.past,
            TOTAL: self.past + self.new,
        }
        return {str(x.name): tuple(_dim(dim, sizes) for dim in x.shape or ()) for x in inputs}


def _dim(dim: int | ir.SymbolicDim, sizes: Mapping[str, int]) -> int:
    return dim if isinstance(dim, int) else sizes[str(dim.value)]


@dataclass(frozen=True, slots=True)
class Profile:
    """least, usual and most are TensorRT's min, opt and max."""

    least: ProfileStep
    usual: ProfileStep
    most: ProfileStep


def profiles(context: int) -> Mapping[str, Profile]:
    """context: positions of a text, which no step goes beyond."""
    chunk = max(1, min(CHUNK, context // 2))
    past = max(0, min(PAST, context // 2) - 1)
    first = ProfileStep(1, 1, 0)
    return {
        "prefill": Profile(
            first, ProfileStep(1, chunk, 0), ProfileStep(TEXTS, chunk, context - chunk)
        ),
        "decode": Profile(first, ProfileStep(1, 1, past), ProfileStep(TEXTS, 1, context - 1)),
    }
