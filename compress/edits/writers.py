"""Which linears of a block an edit looks at, and how each is refitted.

A block writes to the residual stream with attention's output and with the MLP's. With `repair:
drift` they are refitted to what brings the edited stream to the source's, so each also mends what
all before it lost; with `output` to what they gave themselves before the cut; with `none` not.
"""

from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compress.arch.families.table import FAMILIES
from compress.arch.resize.cut import Kept
from compress.arch.spec import BlockSpec, DecoderSpec, LinearSpec
from compress.edits.learned import WRITERS, ExpertChoice, LinearChange, Site, SiteMoments
from compress.edits.repair.ridge import Affine, Refit, refit_to_lack
from compress.edits.select.evidence import Want
from compress.errors import CheckpointError
from compress.report.schema import LinearRepair
from compress.report.units import counted
from compress_calibration.sequences import MINITRON, Aggregates

Repair = Literal["drift", "output", "none"]
UNSEEN = "too few tokens reached the expert to repair it"


def writer_sites(
    block: BlockSpec,
    cut: Collection[str],
    repair: Repair,
    wants: Collection[Want] = (),
    experts: ExpertChoice | None = None,
    sequences: Aggregates = MINITRON,
) -> Iterator[Site]:
    """Attention's output, then the MLP's, as far as something becomes of them.

    cut: roles that lose columns. wants: what these are chosen by. Experts are all looked at
    together, each held to itself, as no residual stream is one expert's alone. Where some of them
    go (`experts`), they are chosen in between, and those that stay are held to the stream together.
    sequences: how inputs are summed sequence by sequence, where that is wanted.
    """
    for role in WRITERS:
        linears = tuple(x for x in block.linears if x.role == role)
        routed = any(x.expert is not None for x in linears)
        fewer = routed and experts is not None
        if fewer:
            yield Site(tuple(x for x in block.linears if x.role == "router"), experts=experts)
        together = repair == "drift" and (fewer or not routed)
        if role in cut or together:
            yield Site(
                linears,
                own=not together,
                sequences=sequences if "sequences" in wants else None,
                # Of an expert that hardly a token was sent to, weights alone say something.
                producers=role in cut and (routed or "producers" in wants),
            )


class Rewritten(NamedTuple):
    """now: the linear with zeros in columns that went. fact: the report's line."""

    now: Affine
    fact: LinearRepair


def refitted(
    linear: LinearSpec, now: Affine, seen: SiteMoments, columns: Tensor | None, repair: Repair
) -> Rewritten:
    """The linear without the columns that go.

    columns: int64, ascending, those that stay; None for all.
    """
    kept, there = linear.shape[1] if columns is None else len(columns), linear.shape[1]
    if repair == "none":
        return Rewritten(_spread(now.weight, columns, now), LinearRepair(linear.name, kept, there))
    if not seen.fit.tokens or not seen.held.tokens:
        fact = LinearRepair(linear.name, kept, there, note=UNSEEN)
        return Rewritten(_spread(now.weight, columns, now), fact)
    made = refit_to_lack(seen.fit, seen.held, now, kept=columns)
    weight = torch.zeros_like(now.weight, dtype=torch.float32)
    weight[:, slice(None) if columns is None else columns] = made.linear.weight
    before, after = (x / seen.energy if seen.energy > 0 else 0.0 for x in (made.before, made.after))
    fact = LinearRepair(linear.name, kept, there, made.penalty, before, after, odd(made))
    return Rewritten(Affine(weight, made.linear.bias), fact)


def mended(linear: LinearSpec, now: Affine, seen: SiteMoments, repair: Repair) -> LinearChange:
    """A linear of which nothing goes, refitted to the source's residual stream."""
    made = refitted(linear, now, seen, None, repair)
    return LinearChange(linear, made.now, Kept(), made.fact)


def odd(made: Refit) -> str:
    """What was out of the ordinary; "" mostly."""
    said = []
    if made.dead:
        columns = counted(made.dead, "column")
        said.append(f"no token drove {columns}, which kept the source's weights")
    if made.singular:
        tried = ", ".join(f"{penalty:g}" for penalty in made.singular)
        said.append(f"no unique solution with a penalty of {tried}")
    return "; ".join(said)


def _spread(weight: Tensor, columns: Tensor | None, now: Affine) -> Affine:
    if columns is None:
        return now
    only = torch.zeros_like(weight)
    only[:, columns] = weight[:, columns]
    return Affine(only, now.bias)


def check_roles(spec: DecoderSpec) -> None:
    """CheckpointError for a decoder whose linears nobody knows the roles of."""
    if spec.family not in FAMILIES:
        raise CheckpointError(
            f"{spec.model_type!r} is in no table of architectures, so nobody knows which of its"
            f" linears write to the residual stream; known are {', '.join(FAMILIES)}"
        )
