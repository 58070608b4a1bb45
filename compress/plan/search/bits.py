"""Bytes that a `prune` and the stage behind it share: what sizes leave for schemes, and what the
best schemes for it would lose.

The losses of schemes are those of the model before the cut (compress/plan/budget.py), in nats a
token as those of sizes are; so the two can be added. A channel that goes takes its share of the
error with it, and a layer keeps its weight: what is chosen in the end is measured on the cut model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.arch.spec import DecoderSpec
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.layout import Entry, nbytes, plan_shards
from compress.edits.prune import PruneConfig
from compress.formats import FORMATS
from compress.formats.storage import WeightStorage
from compress.methods.budget import Option, Unit, choose
from compress.plan.budget import BudgetUnit, Sensitivities, budget_units, waits_for_prune
from compress.plan.search.later import Rounded, format_of, rounded_linears
from compress.recipe import Recipe

# Bytes of a header that a tensor of other bits may take more: digits of its shape and offsets.
DIGITS = 8


@dataclass(frozen=True, slots=True)
class StoredEntries:
    """What the tensors of a dense model become in the result, where each takes the least. rounded:
    by tensor."""

    fmt: str
    rounded: Mapping[str, Rounded]

    def of(self, entry: Entry) -> list[Entry]:
        """The tensors that one becomes."""
        name, dtype, dims = entry
        how = self.rounded.get(name)
        if how is None:
            return [entry]
        transposed = how.linear.transposed
        rows, columns = reversed(dims) if transposed else dims
        fitting = [s for s in how.schemes if columns % s.columns_per_scale(columns) == 0]
        made = [
            FORMATS[self.fmt].layout(
                WeightStorage(name, (rows, columns), scheme, dtype, transposed, how.g_idx)
            )
            for scheme in fitting
        ]
        # Sizes that no candidate divides are none of the space.
        return min(made, key=lambda parts: sum(map(nbytes, parts))) if made else [entry]

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
    rounded = {x.linear.tensor: x for x in rounded_linears(recipe, spec)}
    return StoredEntries(format_of(recipe), rounded)


def budget_of(recipe: Recipe) -> PruneConfig | None:
    """The options of the prune whose bytes a stage behind it shares; None for most recipes."""
    if not waits_for_prune(recipe):
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
