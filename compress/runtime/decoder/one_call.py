"""A decoder whose steps of few tokens are one call of compiled code.

Op by op a step of one token spends as long between compiled code as in it. What the layers of a
decoder call stays the same from step to step, so it is listed once, when an engine opens, and run
as a program; the bits are those of the decoder, op by op, which larger steps still take.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compress.runtime.decoder.attention import Angles
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.norms import through
from compress.runtime.decoder.ops import Scratch, layer_ops, why_not
from compress.runtime.engine.batch import FlatBatch
from compress_kernels.cpu.library import native
from compress_kernels.cpu.program import Program

# Tokens of a step, at most: of 256 what is between compiled code is 2 % of tale-6m's time.
MOST = 256


@dataclass(frozen=True, slots=True, eq=False)
class OneCallDecoder:
    """A DecoderLike over one cache. decoder: what it computes like. scratch: of the program."""

    decoder: Decoder
    cache: KVCache
    scratch: Scratch
    program: Program

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def multiple(self) -> int:
        return self.decoder.multiple

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, cache: KVCache) -> Tensor:
        """As Decoder.forward; cache: the one that the program was made for."""
        assert cache is self.cache, "the program has the addresses of another cache"
        tokens = len(batch.ids)
        if tokens > self.scratch.rows:
            return self.decoder.forward(batch, cache)
        x = self.scratch.x[:tokens]
        x.copy_(self.decoder.embed(batch))
        angles = self.decoder.angles(batch)
        self.program.run(_values(batch, angles))
        return through(self.decoder.final_norm, x[batch.rows])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


class Lowered(NamedTuple):
    """decoder: None where the steps are no program. reason: which kind of layer is in the way; none
    where it is not the model."""

    decoder: OneCallDecoder | None
    reason: str | None = None


def in_one_call(decoder: Decoder, cache: KVCache, most: int) -> Lowered:
    """most: tokens of a step."""
    here = decoder.device.type == "cpu" and native().library is not None
    if decoder.dtype != torch.float32 or not here:
        return Lowered(None)
    reasons = (why_not(layer, cache) for layer in decoder.layers)
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        return Lowered(None, reason)
    scratch = Scratch(min(most, MOST), decoder.spec.hidden)
    pairs = tuple(len(rotation.frequencies) for rotation in decoder.rotations)
    ops = (op for layer in decoder.layers for op in layer_ops(layer, cache, pairs, scratch))
    return Lowered(OneCallDecoder(decoder, cache, scratch, Program.of(tuple(ops))))


def _values(batch: FlatBatch, angles: tuple[Angles, ...]) -> Mapping[str, int]:
    """The numbers of a run of the program."""
    values = {
        "rows": len(batch.ids),
        "threads": torch.get_num_threads(),
        "sequence": batch.sequence.data_ptr(),
        "positions": batch.positions.data_ptr(),
    }
    for group, (table, slots) in enumerate(zip(batch.tables, batch.slots, strict=True)):
        values |= {
            f"table {group}": table.data_ptr(),
            f"width {group}": table.stride(0),
            f"slots {group}": slots.data_ptr(),
        }
    for number, (cos, sin) in enumerate(angles):
        values |= {f"cos {number}": cos.data_ptr(), f"sin {number}": sin.data_ptr()}
    return values
