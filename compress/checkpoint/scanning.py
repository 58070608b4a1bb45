"""Every value of a checkpoint looked at once, for `inspect --verify`."""

from collections.abc import Iterator

from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.finite import NonFinite, find_nonfinite

SLICE_BYTES = 64 << 20


def scan(checkpoint: Checkpoint) -> Iterator[tuple[str, NonFinite | None]]:
    """Reads every value of a checkpoint in slices of 64 MB; yields each tensor with its faults."""
    for name, info in checkpoint.tensors.items():
        if len(info.shape) < 2:
            yield name, find_nonfinite(checkpoint.read(name))
            continue
        rows = max(1, SLICE_BYTES * info.shape[0] // max(info.nbytes, 1))
        total: NonFinite | None = None
        for start in range(0, info.shape[0], rows):
            stop = min(start + rows, info.shape[0])
            found = find_nonfinite(checkpoint.read_rows(name, start, stop))
            total = _merge(total, found, start)
        yield name, total


def _merge(total: NonFinite | None, found: NonFinite | None, row: int) -> NonFinite | None:
    if found is None:
        return total
    if total is None:
        return found.below(row)
    return NonFinite(total.nan + found.nan, total.inf + found.inf, total.first)
