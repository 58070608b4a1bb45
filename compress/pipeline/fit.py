"""Whether a recipe's choices fit a decoder: what cannot work is refused before any work."""

from collections.abc import Iterable, Iterator, Sequence
from math import gcd

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.errors import RecipeError
from compress.pipeline.modules import ModulePlan, Skipped
from compress.recipe import Recipe
from compress.recipe.matching import matches

LARGEST_GROUP = 256  # of those a message proposes
SHOWN = 6


def refuse_tied_head(recipe: Recipe, spec: DecoderSpec) -> None:
    """RecipeError for a target that means the output head of a model that has none of its own."""
    if spec.head is not None:
        return
    head = LinearSpec("lm_head", "lm_head.weight", (spec.vocab, spec.hidden), "head", "", "")
    for stage in recipe.stages:
        for i, pattern in enumerate(stage.targets):
            if matches(pattern, head) and not any(matches(pattern, x) for x in spec.linears()):
                raise RecipeError(
                    f"{stage.at(f'targets[{i}]')}: {pattern!r} means the output head, which this"
                    " model does not store: it is tied to the embedding; take the target out"
                )


def check_groups(recipe: Recipe, modules: Iterable[ModulePlan]) -> None:
    """RecipeError when a layer's width is no multiple of its group, with sizes that would do."""
    modules = list(modules)
    bad = [m for m in modules if m.linear.shape[1] % m.scheme.columns_per_scale(m.linear.shape[1])]
    if not bad:
        return
    first = bad[0]
    size = first.scheme.group_size
    widths = [m.linear.shape[1] for m in modules if m.stage == first.stage]
    fitting = [g for g in range(2, LARGEST_GROUP + 1) if gcd(*widths) % g == 0]
    near = sorted(sorted(fitting, key=lambda g: abs(g - size))[:3])
    remedy = f"group_size {', '.join(map(str, near))} or " if near else ""
    more = f" (nor have {len(bad) - 1} more layers)" if len(bad) > 1 else ""
    raise RecipeError(
        f"{recipe.stages[first.stage].at('group_size')}: {first.linear.name} has"
        f" {first.linear.shape[1]} input columns, not a multiple of {size}{more};"
        f" use {remedy}granularity: channel"
    )


def check_fused(modules: Iterable[ModulePlan], skipped: Iterable[Skipped]) -> None:
    """RecipeError unless layers that serving runtimes merge into one matrix are stored alike."""
    schemes: dict[tuple[int | None, str, int | None], dict[str, str]] = {}

    def note(linear: LinearSpec, block: int | None, scheme: str) -> None:
        if linear.fused is not None:
            schemes.setdefault((block, linear.fused, linear.expert), {})[linear.name] = scheme

    for m in modules:
        note(m.linear, m.block, m.scheme.describe() + (" with g_idx" if m.g_idx else ""))
    for s in skipped:
        note(s.linear, s.block, "unquantized")
    for members in schemes.values():
        if len(set(members.values())) > 1:
            shown = ", ".join(f"{name} {scheme}" for name, scheme in members.items())
            raise RecipeError(
                f"stages: {shown}; runtimes merge these into one matrix, so give them one scheme"
            )


def against_parallel(n: int, spec: DecoderSpec, modules: Sequence[ModulePlan]) -> tuple[str, ...]:
    """Why the result cannot be split over n devices without padding; empty when it can."""
    reasons: dict[str, str] = {}
    if spec.heads % n:
        reasons["heads"] = f"{spec.heads} heads do not divide by {n}"
    for m in modules:
        rows, columns = m.linear.shape
        role = m.linear.role
        if role in ("o", "down"):
            step = m.scheme.columns_per_scale(columns)
            if columns % n:
                reasons[role] = f"{role}: {columns} columns do not divide by {n}"
            elif m.scheme.granularity == "group" and (columns // n) % step:
                reasons[role] = f"{role}: {columns // n} columns a shard are no multiple of {step}"
        elif rows % n:
            reasons[role] = f"{role}: {rows} rows do not divide by {n}"
    return tuple(reasons.values())


def warnings(spec: DecoderSpec) -> Iterator[str]:
    """What a person should know about how the decoder was read."""
    if spec.family == "generic":
        yield (
            f"model type {spec.model_type!r} is in no architecture table: layers were found by"
            " name and shape"
        )
    unrecognised = [name for block in spec.blocks for name in block.unrecognised]
    if unrecognised:
        more = f" and {len(unrecognised) - SHOWN} more" if len(unrecognised) > SHOWN else ""
        yield f"copied as they are, not recognised: {', '.join(unrecognised[:SHOWN])}{more}"
