"""What tensors are called when blocks or experts before them have gone."""

import re
from bisect import bisect_left
from collections.abc import Sequence

from compress.arch.families.table import FAMILIES
from compress.arch.spec import DecoderSpec


def block_name(spec: DecoderSpec, name: str, layers: Sequence[int] | None) -> str | None:
    """Name of a tensor when only these blocks stay, in this order; None if its block goes.

    layers: ascending; None for all. What lies behind the last block (modules that predict further
    tokens) moves down with it; other tensors keep their names.
    """
    stack = spec.blocks[0].prefix.rpartition(".")[0]
    match = re.match(rf"{re.escape(stack)}\.(\d+)\.", name)
    if layers is None or match is None:
        return name
    index, count = int(match[1]), len(spec.blocks)
    if index < count and index not in layers:
        return None
    place = bisect_left(layers, index) + max(index - count, 0)
    return f"{stack}.{place}.{name[match.end() :]}"


def expert_name(spec: DecoderSpec, name: str, experts: Sequence[int] | None) -> str | None:
    """Name of a tensor when only these experts of its block stay, in this order; None if it is of
    an expert that goes. experts: ascending; None for all."""
    found = _expert(spec, name)
    if experts is None or found is None:
        return name
    before, expert, behind = found
    return f"{before}{experts.index(expert)}{behind}" if expert in experts else None


def _expert(spec: DecoderSpec, name: str) -> tuple[str, int, str] | None:
    """A tensor's name up to the number of its expert, the number, and the rest."""
    stack = spec.blocks[0].prefix.rpartition(".")[0]
    heads = {
        row.disk.partition("{e}")[0] for row in FAMILIES[spec.family].sparse if "{e}" in row.disk
    }
    for head in heads:
        match = re.match(rf"({re.escape(stack)}\.\d+\.{re.escape(head)})(\d+)(\..*)", name)
        if match:
            return match[1], int(match[2]), match[3]
    return None
