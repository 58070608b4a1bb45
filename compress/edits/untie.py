"""untie: an output head of its own for a model whose head is the embedding.

The head begins with the embedding's values, so the model computes what it did; from then on the two
may be rounded, cut or trained apart. Costs the embedding's bytes once more.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.dtype_codes import itemsize
from compress.checkpoint.ties import head_name, tied_config
from compress.edits.edit import Edited, Part, Rows
from compress.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class UntieConfig:
    """No options."""


def plan(source: Outline, config: UntieConfig) -> Edited:
    """The same tensors and the head behind them; CheckpointError where there is one."""
    spec = source.spec
    if not spec.tied:
        raise CheckpointError(
            f"the model has an output head of its own already ({spec.head}); take the stage out"
        )
    embedding = source.tensors[spec.embedding]
    entries = [(info.name, info.dtype, info.shape) for info in source.tensors.values()]
    entries.append((head_name(spec), embedding.dtype, embedding.shape))
    return Edited(tied_config(source.config, tied=False), tuple(entries))


def apply(part: Part, config: UntieConfig) -> Iterator[Rows]:
    """Every tensor as it is, and the embedding once more."""
    spec = part.source.spec
    for name in part.names:
        for start, rows in part.in_rows(name):
            yield Rows(name, start, rows)
            if name == spec.embedding:
                yield Rows(head_name(spec), start, rows)


def held(source: Outline, config: UntieConfig, run: int) -> int:
    """A run of rows."""
    return run * max(itemsize(info.dtype) for info in source.tensors.values())
