"""Whether layers that serving runtimes merge into one matrix are stored alike."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from compress.arch.spec import LinearSpec
from compress.errors import RecipeError
from compress.plan.layers import ModulePlan, Skipped
from compress.recipe import Recipe
from compress.recipe.matching import key_of


@dataclass(frozen=True, slots=True)
class _Member:
    """A layer, how it will be stored in words, and the key of the recipe that says so."""

    linear: LinearSpec
    block: int | None
    stored: str
    key: str | None

    @property
    def leaf(self) -> str:
        return self.linear.name.rpartition(".")[2]


def check_fused(recipe: Recipe, modules: Iterable[ModulePlan], skipped: Iterable[Skipped]) -> None:
    """RecipeError, at the key that sets one layer apart, unless merged layers are stored alike."""
    groups: dict[tuple[int | None, str, int | None], list[_Member]] = {}
    for member in _members(recipe, modules, skipped):
        x = member.linear
        if x.fused is not None:
            groups.setdefault((member.block, x.fused, x.expert), []).append(member)
    for members in groups.values():
        if len({member.stored for member in members}) > 1:
            raise RecipeError(_refusal(recipe, members))


def _members(
    recipe: Recipe, modules: Iterable[ModulePlan], skipped: Iterable[Skipped]
) -> Iterator[_Member]:
    for m in modules:
        label = recipe.stages[m.stage].label
        # A number for all that are merged is chosen by one stage.
        stage = f" of {label}" if m.scheme.spans_merged else ""
        stored = m.scheme.describe() + stage + (" with g_idx" if m.g_idx else "")
        yield _Member(m.linear, m.block, stored, f"{label}.targets")
    for s in skipped:
        yield _Member(s.linear, s.block, "unquantized", key_of(s.reason))


def _refusal(recipe: Recipe, members: Sequence[_Member]) -> str:
    counts = Counter(member.stored for member in members)

    def usual(member: _Member) -> tuple[int, bool]:
        """Rare ones first, and those that an override or an ignore speaks of in particular."""
        key = member.key or ""
        return counts[member.stored], not (".overrides[" in key or key.endswith(".ignore"))

    odd = min(reversed(members), key=usual)
    other = next(member for member in members if member.stored != odd.stored)
    place = recipe.at(odd.key or other.key or "stages")
    *leaves, last = [member.leaf for member in members]
    return (
        f"{place}: {odd.linear.name} would be {odd.stored} and {other.linear.name}"
        f" {other.stored}; runtimes merge {', '.join(leaves)} and {last} into one matrix, so name"
        " all of them here or none"
    )
