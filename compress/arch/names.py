"""Small shared steps on tensor names and shapes."""

import re
from collections.abc import Mapping, Sequence
from math import prod

from compress.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
MAX_UNRECOGNISED = 0.05  # share of a block's elements
_SHOWN = 6


def join(prefix: str, name: str) -> str:
    """Dotted path; an empty prefix adds no dot."""
    return f"{prefix}.{name}" if prefix else name


def shape_of(
    tensors: Shapes, name: str, expected: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Shape of a tensor that must be there. Raises CheckpointError if not, or if it differs."""
    shape = tensors.get(name)
    if shape is None:
        raise CheckpointError(
            f"tensor {name} is missing; the checkpoint is incomplete or config.json belongs to"
            " another model"
        )
    if expected is not None and tuple(shape) != expected:
        raise CheckpointError(
            f"tensor {name} has shape {list(shape)}, config.json asks for {list(expected)};"
            " take weights and config of the same model"
        )
    return tuple(shape)


def group_blocks(tensors: Shapes, stack: str) -> dict[int, list[str]]:
    """Names below `<stack>.<index>.`, by index."""
    pattern = re.compile(re.escape(join(stack, "")) + r"(\d+)\.")
    groups: dict[int, list[str]] = {}
    for name in tensors:
        match = pattern.match(name)
        if match:
            groups.setdefault(int(match[1]), []).append(name)
    return groups


def find_head(tensors: Shapes, prefix: str, names: Sequence[str]) -> str | None:
    """The output projection: beside the decoder or beside one of its parents, nearest first."""
    parts = prefix.split(".") if prefix else []
    for depth in range(len(parts), -1, -1):
        for name in names:
            path = join(".".join(parts[:depth]), name)
            if path in tensors:
                return path
    return None


def check_recognised(prefix: str, unrecognised: Sequence[str], tensors: Shapes, total: int) -> None:
    """Refuse a block of which too much is unknown. total: elements of the whole block."""
    unknown = sum(prod(tensors[name]) for name in unrecognised)
    if unknown <= MAX_UNRECOGNISED * total:
        return
    shown = ", ".join(name.removeprefix(prefix + ".") for name in unrecognised[:_SHOWN])
    more = f" and {len(unrecognised) - _SHOWN} more" if len(unrecognised) > _SHOWN else ""
    raise CheckpointError(
        f"{prefix}: {100 * unknown / total:.0f} % of the block's parameters are not recognised"
        f" ({shown}{more}); at most {100 * MAX_UNRECOGNISED:.0f} % may be, this architecture"
        " is not supported"
    )
