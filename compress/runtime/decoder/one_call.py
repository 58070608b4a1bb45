"""A decoder whose steps of few tokens are one call of compiled code.

Op by op a step of one token spends as long between compiled code as in it. What the layers of a
decoder call stays the same from step to step, so it is listed once, when an engine opens, and run
as a program; the bits are those of the decoder, op by op, which larger steps still take.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compress.runtime.decoder.attention import Angles
from compress.runtime.decoder.decoder import Decoder
from compress.runtime.decoder.kv import KVCache
from compress.runtime.decoder.ops import choice_ops, decoder_ops, why_not
from compress.runtime.decoder.rope import Rotation
from compress.runtime.decoder.scratch import Choices, Scratch
from compress.runtime.decoder.step_memory import StepMemory
from compress.runtime.engine.batch import FlatBatch, TextChunk
from compress.runtime.sampling.head import rows_at_once
from compress.runtime.sampling.sampling import Best
from compress_kernels.cpu.library import native
from compress_kernels.cpu.program import Program
from compress_kernels.ops.pairs import compiled_pairs

# Tokens of a step, at most: as many as the engine takes by default.
MOST = 512
# What differs from step to step where the memory stays.
BY_STEP = ("rows", "wanted rows", "threads")
# Positions of a text, at most, where the model says nothing of them.
LONGEST = 1 << 17
# Numbers of a table of angles, at most: 32 MB each of cosine and sine.
TABLE = 1 << 23


@dataclass(frozen=True, slots=True, eq=False)
class OneCallDecoder:
    """A DecoderLike over one cache.

    decoder: what it computes like. scratch: of the programs. tables: of each rotation cosine and
    sine of every position, None where they depend on more. program: what forward() computes.
    greedy: the same and the choices behind it, given all but BY_STEP; None where the head is no op,
    or a table is missing. given, chosen: what it reads and writes.
    """

    decoder: Decoder
    cache: KVCache
    scratch: Scratch
    tables: tuple[Angles | None, ...]
    program: Program
    greedy: Program | None
    given: StepMemory
    chosen: Choices

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
        if max(len(batch.ids), len(batch.rows)) > self.scratch.rows:
            return self.decoder.forward(batch, cache)
        if None in self.tables:
            self._turn(batch)
        self.program.run(self.program.numbers(_values(batch)))
        return self.scratch.final[: len(batch.rows)].clone()

    def best(self, chunks: Several[TextChunk]) -> Best | None:
        """A greedy step; None, and nothing is computed, where it is not one call: of too many rows,
        of a head that is no op, or of rotations that depend on the length of a text."""
        program, chosen = self.greedy, self.chosen
        written = None if program is None else self.given.write(chunks)
        if program is None or written is None:
            return None
        count, rows = written
        program.given[: len(BY_STEP)] = [count, rows, torch.get_num_threads()]
        program.again()
        return Best(chosen.tokens[:rows], chosen.highest[:rows])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)

    @torch.inference_mode()
    def _turn(self, batch: FlatBatch) -> None:
        """Angles of the step, where no table has them."""
        for number, (table, found) in enumerate(
            zip(self.tables, self.decoder.angles(batch), strict=True)
        ):
            if table is None:
                for angles, into in zip(
                    found, self.scratch.angles(number, found[0].shape[1]), strict=True
                ):
                    into[: len(angles)] = angles


class Lowered(NamedTuple):
    """decoder: None where the steps are no program, for a reason."""

    decoder: OneCallDecoder | None
    reason: str | None = None


def why_no_calls(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why compiled code does not compute all of a decoder in a dtype there; None where it does. In
    fp16 its products are compiled, and what goes in and comes out is converted by torch."""
    pairs = compiled_pairs(device)
    if device.type != "cpu":
        return f"compiled steps are for the CPU, and this is {device.type}"
    if native().library is None:
        return f"nothing is compiled ({native().reason})"
    if dtype == torch.float32 or (dtype == torch.bfloat16 and pairs):
        return None
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype))
    return f"no compiled step is in {name}; take dtype {'bf16 or ' * pairs}fp32"


def in_one_call(decoder: Decoder, cache: KVCache, most: int) -> Lowered:
    """most: tokens of a step."""
    reason = why_no_calls(decoder.dtype, decoder.device) or why_not(decoder)
    if reason is not None:
        return Lowered(None, reason)
    scratch = Scratch(min(most, MOST), decoder.spec.hidden, decoder.dtype)
    tables = tuple(_table(rotation, decoder) for rotation in decoder.rotations)
    logits = decoder.head.weight.shape[0]
    rows = min(scratch.rows, rows_at_once(logits))
    given = StepMemory.of(rows, cache.groups, cache.block_size, decoder.spec.context or LONGEST)
    chosen = Choices.of(rows, logits, decoder.dtype)
    ops = tuple(decoder_ops(decoder, cache, tables, scratch))
    choice = () if None in tables else tuple(choice_ops(decoder, scratch, chosen))
    greedy = Program.of((*ops, *choice), BY_STEP) if choice else None
    if greedy is not None:
        greedy.write({**given.values(), **dict.fromkeys(BY_STEP, 0)})
    program = Program.of(ops, BY_STEP)
    return Lowered(OneCallDecoder(decoder, cache, scratch, tables, program, greedy, given, chosen))


def _table(rotation: Rotation, decoder: Decoder) -> Angles | None:
    """Cosine and sine of every position as numbers of the dtype that the rotation happens in, fp32
    [context, pairs] each; None where they depend on the length of a text, or are too many."""
    pairs, context = len(rotation.frequencies), decoder.spec.context
    if rotation.rope.length is not None or context is None or context * pairs > TABLE:
        return None
    positions = torch.arange(context, device=rotation.frequencies.device)
    cos, sin = rotation.angles(positions, positions)
    if decoder.how.rotate_late:
        return cos, sin
    return cos.to(decoder.dtype).float(), sin.to(decoder.dtype).float()


def _values(batch: FlatBatch) -> Mapping[str, int]:
    """The numbers of a run of the program."""
    values = {
        "rows": batch.ids.numel(),
        "threads": torch.get_num_threads(),
        "ids": batch.ids.data_ptr(),
        "positions": batch.positions.data_ptr(),
        "sequence": batch.sequence.data_ptr(),
        "wanted": batch.rows.data_ptr(),
        "wanted rows": batch.rows.numel(),
    }
    for group, (table, slots) in enumerate(zip(batch.tables, batch.slots, strict=True)):
        values[f"table {group}"] = table.data_ptr()
        values[f"width {group}"] = table.stride(0)
        values[f"slots {group}"] = slots.data_ptr()
    return values
