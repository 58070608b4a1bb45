"""Bytes that a `prune` and the stage behind it share: what sizes leave for schemes, and what the
best schemes for it would lose.

The losses of schemes are those of the model before the cut (compress/plan/budget.py), in nats a
token as those of sizes are; so the two can be added. A channel that goes takes its share of the
error with it, and a layer keeps its weight: what is chosen in the end is measured on the cut model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compress.arch.spec import DecoderSpec
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.layout import Entry, nbytes, plan_shards
from compress.edits.prune import PruneConfig
from compress.formats import FORMATS
from compress.formats.storage import WeightStorage
from compress.methods import METHODS
from compress.methods.budget import Option, Unit, choose
from compress.plan.budget import BudgetUnit, Sensitivities, budget_units, one_by_one
from compress.plan.output_format import choose_format
from compress.quant.scheme import QuantScheme
from compress.recipe import Recipe
from compress.recipe.matching import select

# Bytes of a header that a tensor of other bits may take more: digits of its shape and offsets.
DIGITS = 8


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """How the result stores a weight. schemes: one of these. transposed: the source has [K, N]."""

    schemes: tuple[QuantScheme, ...]
    transposed: bool
    g_idx: bool


@dataclass(frozen=True, slots=True)
class StoredEntries:
    """What the tensors of a dense model become in the result, where each takes the least."""

    fmt: str
    rounded: Mapping[str, StoredWeight]

    def of(self, entry: Entry) -> list[Entry]:
        """The tensors that one becomes."""
        name, dtype, dims = entry
        how = self.rounded.get(name)
        if how is None:
            return [entry]
        rows, columns = reversed(dims) if how.transposed else dims
        made = [
            FORMATS[self.fmt].layout(
                WeightStorage(name, (rows, columns), scheme, dtype, how.transposed, how.g_idx)
            )
            for scheme in how.schemes
        ]
        return min(made, key=lambda parts: sum(map(nbytes, parts)))

    def nbytes(self, entry: Entry) -> int:
        """Bytes of the tensors that one becomes."""
        return sum(map(nbytes, self.of(entry)))

    def header_bytes(self, entries: Sequence[Entry], shard_size: int) -> int:
        """Of the files that all of them lie in, and what other schemes may add to it."""
        parts = [part for entry in entries for part in self.of(entry)]
        layout = plan_shards(parts, shard_size)
        return layout.total_bytes - sum(map(nbytes, parts)) + DIGITS * len(parts)


def stored_entries(recipe: Recipe, spec: DecoderSpec) -> StoredEntries:
    """Of a recipe whose stages round the layers of a decoder."""
    fmt = choose_format(replace(recipe, stages=tuple(one_by_one(recipe.stages))))
    linears = {x.name: x for x in spec.all_linears()}
    found = {}
    for stage in recipe.stages:
        schemes = stage.candidates or (() if stage.scheme is None else (stage.scheme,))
        g_idx = METHODS[stage.method].needs(stage.config).g_idx
        for name in select(stage, tuple(linears.values()))[0] if schemes else ():
            linear = linears[name]
            width = linear.shape[1]
            fitting = [s for s in schemes if width % s.columns_per_scale(width) == 0]
            kept = tuple(fitting or schemes)
            found[linear.tensor] = StoredWeight(kept, linear.transposed, g_idx)
    return StoredEntries(fmt, found)


def budget_of(recipe: Recipe) -> PruneConfig | None:
    """The options of the prune whose bytes a stage behind it shares; None for most recipes."""
    if not any(x.target is not None and x.target.of is not None for x in recipe.stages):
        return None
    found = [x.config for x in recipe.edits if isinstance(x.config, PruneConfig)]
    return next((x for x in found if x.budget is not None), None)


@dataclass(frozen=True, slots=True, eq=False)
class SharedBytes:
    """What sizes leave for schemes. recipe: with all its edits before the cut and its stages.
    before: the model that is cut, of which `found` tells what its layers lose. limit: bytes of the
    files of the result."""

    recipe: Recipe
    before: Outline
    found: Sensitivities
    limit: int

    def best(self, after: Outline, kept: Sequence[int]) -> tuple[float, int]:
        """What the best schemes lose in a model that was cut, and the bytes of the result.

        kept: the block of `before` that each block is made of. RecipeError where the smallest
        schemes take more than is left.
        """
        units = budget_units(self.recipe, after)
        least = least_bytes(self.recipe, after)
        names = _names(self.before, after, kept)
        smallest = sum(min(unit.sizes) for unit in units)
        left = self.limit - (least - smallest)
        found = choose([self._choosable(unit, names) for unit in units], left)
        return found.loss, least - smallest + found.bytes

    def _choosable(self, unit: BudgetUnit, names: Mapping[str, str]) -> Unit:
        shares, errors = self.found.shares, self.found.errors
        options = []
        for scheme, size in zip(unit.schemes, unit.sizes, strict=True):
            label = scheme.describe()
            known = [names[x.name] for x in unit.linears]
            options.append(Option(label, size, sum(shares[x] * errors[x][label] for x in known)))
        return Unit(unit.name, tuple(options))


def least_bytes(recipe: Recipe, model: Outline) -> int:
    """Of the files of the result, with the smallest schemes; a little more than that."""
    stored = stored_entries(recipe, model.spec)
    entries = list(model.entries)
    header = stored.header_bytes(entries, recipe.output.shard_size)
    return sum(map(stored.nbytes, entries)) + header


def _names(before: Outline, after: Outline, kept: Sequence[int]) -> dict[str, str]:
    """The layer before the cut that each one is made of; of experts, stored alike, any."""
    found: dict[str, str] = {}
    for block, index in zip(after.spec.blocks, kept, strict=True):
        was = {(x.role, x.expert): x.name for x in before.spec.blocks[index].linears}
        found |= {x.name: was[x.role, x.expert] for x in block.linears}
    return found
