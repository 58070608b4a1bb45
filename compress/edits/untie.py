"""untie: gives a model whose output head is the embedding a head of its own.

The head has the embedding's values, so the model computes the same as before. Later stages can then
change the head and the embedding separately. The model grows by the bytes of the embedding.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from compress.checkpoint.outline import Outline
from compress.checkpoint.ties import head_name, tied_config
from compress.edits.edit import Edited, Part, Rows, copied_bytes
from compress.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class UntieConfig:
    """No options."""


def plan(source: Outline, config: UntieConfig) -> Edited:
    """All tensors of the source and, after them, the head.

    CheckpointError for a model that has a head of its own already.
    """
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
    """Every tensor unchanged, and the embedding a second time as the head."""
    spec = part.source.spec
    for name in part.names:
        for start, rows in part.in_rows(name):
            yield Rows(name, start, rows)
            if name == spec.embedding:
                yield Rows(head_name(spec), start, rows)


def held(source: Outline, config: UntieConfig, run: int) -> int:
    """Bytes of one run of rows."""
    return copied_bytes(source, run)
