"""A training as it stands between two steps, and its file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint import disk
from compress.checkpoint.reading import read_into
from compress.checkpoint.shards.dtypes import DTYPE_CODES, TORCH_DTYPES
from compress.checkpoint.shards.header import read_header
from compress.checkpoint.shards.layout import single_file
from compress.checkpoint.shards.writer import ShardWriter
from compress.errors import OutputError

_STANDING = (
    "standing"  # JSON as bytes: the header of a file of ours says names, dtypes and shapes only
)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The losses as they were measured after so many steps.

    tokens: trained on so far. train: mean since the point before, None at the start. held: on the
    held-out rows. rate: of the last step, 0 at the start.
    """

    step: int
    tokens: int
    train: float | None
    held: float
    rate: float


@dataclass(frozen=True, slots=True)
class Standing:
    """What of a training is no tensor.

    step: those done. curve: from the start on. best: step of the best state. peak: the rate that
    the schedule is a share of. summed, tokens_since: losses and tokens since the last point.
    tokens: trained on so far. ended: why it goes no further, empty while it does.
    """

    step: int
    curve: tuple[CurvePoint, ...]
    best: int
    peak: float
    summed: float = 0.0
    tokens_since: int = 0
    tokens: int = 0
    ended: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """All that a training goes on from. No generator is in it: nothing is drawn by order.

    weights, best: what is trained, as it is now and as it was best, by names of the trainer; best
    is empty while that is the start. optimizer: see `optimizer.state_tensors`.
    """

    standing: Standing
    weights: Mapping[str, Tensor]
    best: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


def write_state(path: Path, state: State) -> None:
    """Replace the file: a reader, or a crash, sees the old state or the new one.

    It is a safetensors file; the old one stays until the new one is on the disk, so there must be
    room for both.
    """
    raw = torch.frombuffer(
        bytearray(json.dumps(asdict(state.standing)).encode()), dtype=torch.uint8
    )
    tensors = {_STANDING: raw}
    for part in _PARTS:
        held: Mapping[str, Tensor] = getattr(state, part)
        tensors |= {f"{part}.{name}": value for name, value in held.items()}
    temporary = path.with_name(path.name + ".new")
    entries = [(name, DTYPE_CODES[x.dtype], tuple(x.shape)) for name, x in tensors.items()]
    with disk.refusing(f"write {path}"):
        if temporary.exists():
            disk.unlink(temporary)
    writer = ShardWriter.create(path.parent, single_file(temporary.name, entries))
    for name, value in tensors.items():
        writer.write(name, value)
    writer.finish()
    with disk.refusing(f"write {path}"):
        disk.rename(temporary, path)
        disk.fsync_path(path.parent)


def read_state(path: Path) -> State | None:
    """The state in a file; None where there is no file. Raises OutputError for a damaged one."""
    if not path.exists():
        return None
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    standing = Standing(0, (), 0, 0.0)
    for name, info in read_header(path, path.name).items():
        value = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype])
        if value.numel():
            read_into(path, value.view(-1).view(torch.uint8).numpy().data, info.start)
        if name == _STANDING:
            standing = _standing(path, value)
        else:
            part, _, rest = name.partition(".")
            parts[part][rest] = value
    return State(standing, **parts)


_PARTS = ("weights", "best", "optimizer")


def _standing(path: Path, raw: Tensor) -> Standing:
    try:
        held = json.loads(raw.numpy().tobytes())
        held["curve"] = tuple(CurvePoint(**point) for point in held["curve"])
        return Standing(**held)
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"{path} is not the state of a training ({error}); remove {path.parent} and start again"
        ) from error
