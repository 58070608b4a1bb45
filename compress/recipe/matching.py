"""Which layers a stage takes.

A pattern is a glob over a layer's full name ("model.layers.0.*") or over its last parts
("down_proj", "self_attn.*_proj"), or "re:" and a regular expression for the full name. The words
"lm_head", "router" and "embedding" also mean the output head, the routers and the token embedding,
whatever they are called. The embedding belongs to a stage only where a target means nothing else:
"*" stands for layers that multiply.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from compress.arch.spec import LinearSpec
from compress.errors import RecipeError
from compress.expressions import expression
from compress.recipe.reading.patterns import ROLE_OF_WORD, Means, meanings
from compress.recipe.schema import Claim, Stage

NO_STAGE = "no stage targets it"


def key_of(reason: str) -> str | None:
    """The key of the recipe that a reason of `Assignment` names; None where no stage does."""
    return None if reason == NO_STAGE else reason.rpartition(" in ")[2]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Stages by layer name.

    stage_of: the one that rounds the layer. folds_of: those that scale its channels before, in
    order; empty for most. reason_of: why a layer that no stage rounds is left.
    """

    stage_of: Mapping[str, int]
    folds_of: Mapping[str, tuple[int, ...]]
    reason_of: Mapping[str, str]


def of_stage(stage: Stage, key: Literal["targets", "ignore"]) -> list[tuple[str, Means]]:
    """The patterns of a stage under a key, each with what it means."""
    return meanings(getattr(stage, key), f"{stage.label}.{key}", stage.places)


def select(stage: Stage, linears: Iterable[LinearSpec]) -> tuple[list[str], dict[str, str]]:
    """Names of the layers a stage takes, and for those it targets but ignores, the reason.

    Raises RecipeError for a pattern that means no layer (the role words may, in `ignore`: a model
    with tied embeddings has no head) and for a stage whose targets are all ignored.
    """
    linears = list(linears)
    _check_patterns(stage, "targets", linears)
    _check_patterns(stage, "ignore", linears)
    claimed = {x.name for claim in stage.claims for x in _taken_by(claim, stage, linears)}
    inside, taken, ignored = _inside(stage, linears), [], {}
    ignore = of_stage(stage, "ignore")
    for linear in inside:
        if linear.name in claimed:
            continue
        by = _first(ignore, linear)
        if by is None:
            taken.append(linear.name)
        else:
            ignored[linear.name] = f"ignored by {by!r} in {stage.base}.ignore"
    if not taken:
        raise _none_left(stage, inside, claimed)
    return taken, ignored


def _named(
    patterns: Sequence[tuple[str, Means]], linears: Sequence[LinearSpec]
) -> list[LinearSpec]:
    """The layers that a list of targets names.

    Not the embedding where a pattern means a layer that multiplies as well.
    """
    means = [found for _, found in patterns]
    plain = [m for m in means if any(x.role != "embedding" and m(x) for x in linears)]
    lookups = [m for m in means if m not in plain]
    return [x for x in linears if any(m(x) for m in (lookups if x.role == "embedding" else plain))]


def _inside(stage: Stage, linears: Sequence[LinearSpec]) -> list[LinearSpec]:
    """The layers that a stage names; RecipeError for an override that names none of its stage."""
    targeted = _named(of_stage(stage, "targets"), linears)
    if not stage.within:
        return targeted
    outer = meanings(stage.within, f"{stage.base}.targets", stage.places)
    within = {x.name for x in _named(outer, linears)}
    inside = [x for x in targeted if x.name in within]
    if not inside:
        some = f"none of the {len(targeted)} layers" if len(targeted) > 1 else "the layer"
        verb = "is" if len(targeted) > 1 else "is not"
        raise RecipeError(
            f"{stage.at('targets')}: {some} it names {verb} among the targets of {stage.base}"
            f" ({', '.join(map(repr, stage.within))}); add it there"
        )
    return inside


def _none_left(stage: Stage, inside: Sequence[LinearSpec], claimed: Collection[str]) -> RecipeError:
    ignore = of_stage(stage, "ignore")
    lost = [x for x in inside if x.name in claimed and not _first(ignore, x)]
    if lost:
        by = "later overrides, which win" if stage.within else "its overrides"
        all_of = f"all {len(lost)} of its layers are" if len(lost) > 1 else "its only layer is"
        return RecipeError(f"{stage.at('targets')}: {all_of} taken by {by}; take one of them out")
    all_of = (
        f"all {len(inside)} layers it names are" if len(inside) > 1 else "the layer it names is"
    )
    return RecipeError(
        f"{stage.at('targets')}: {all_of} in this stage's ignore"
        f" ({', '.join(map(repr, stage.ignore))}); set ignore to what it should leave"
    )


def _taken_by(claim: Claim, stage: Stage, linears: Sequence[LinearSpec]) -> list[LinearSpec]:
    targets = meanings(claim.targets, f"{claim.path}.targets", stage.places)
    ignore = meanings(claim.ignore, f"{claim.path}.ignore", stage.places)
    return [x for x in _named(targets, linears) if not _first(ignore, x)]


def _first(patterns: Iterable[tuple[str, Means]], linear: LinearSpec) -> str | None:
    """The first of the patterns that means the layer."""
    return next((pattern for pattern, means in patterns if means(linear)), None)


def _skips(stage: Stage, linears: Sequence[LinearSpec]) -> dict[str, str]:
    """Reasons of the layers that overrides of the stage leave as they are, by name."""
    reasons = {}
    for i, claim in enumerate(stage.claims):
        if claim.skip and not stage.within:
            skipping = replace(
                stage,
                targets=claim.targets,
                ignore=claim.ignore,
                within=stage.targets,
                claims=stage.claims[i + 1 :],
                path=claim.path,
            )
            taken = set(select(skipping, linears)[0])
            targets = of_stage(skipping, "targets")
            for linear in (x for x in linears if x.name in taken):
                by = _first(targets, linear)
                reasons[linear.name] = f"skipped by {by!r} in {claim.path}.targets"
    return reasons


def assign(stages: Sequence[Stage], linears: Iterable[LinearSpec]) -> Assignment:
    """The stages of every layer.

    A layer is rounded once, and scaled before that. Where no stage rounds what another scales, the
    scaling stage does so itself, to its own scheme, unless a stage that rounds skips the layer.
    RecipeError where that is not so.
    """
    linears = list(linears)
    stage_of: dict[str, int] = {}
    scaled_by: dict[str, tuple[int, ...]] = {}
    ignored: dict[str, str] = {}
    skipped: dict[str, str] = {}
    left: set[str] = set()
    for i, stage in enumerate(stages):
        taken, reasons = select(stage, linears)
        for name in taken:
            if name in stage_of:
                raise RecipeError(_taken_twice(stages, stage, name, stage_of[name]))
            if not _scales(stage):
                stage_of[name] = i
            else:
                scaled_by[name] = (*scaled_by.get(name, ()), i)
        ignored |= reasons
        skips = _skips(stage, linears)
        skipped |= skips
        left |= set() if _scales(stage) else skips.keys()
    for name in left - stage_of.keys():
        scaled_by.pop(name, None)
    for name, takers in scaled_by.items():
        _settle_scheme(stages, name, takers, stage_of)
    reasons = ignored | skipped
    return Assignment(
        stage_of,
        {name: tuple(scaled_as(stages, i) for i in takers) for name, takers in scaled_by.items()},
        {x.name: reasons.get(x.name, NO_STAGE) for x in linears if x.name not in stage_of},
    )


def scaled_as(stages: Sequence[Stage], i: int) -> int:
    """The stage that scales for this one.

    An override with the options of its stage leaves that to it: layers that read the same
    channels are scaled together, whatever their schemes.
    """
    if not stages[i].within:
        return i
    options = (stages[i].base, stages[i].config)
    return next(j for j, x in enumerate(stages) if (x.base, x.config) == options)


def _scales(stage: Stage) -> bool:
    """Whether the stage scales channels; late, because methods bring torch."""
    from compress.methods import METHODS

    return METHODS[stage.method].fold is not None


def _taken_twice(stages: Sequence[Stage], stage: Stage, name: str, first: int) -> str:
    if _scales(stage):
        return (
            f"{stage.at('method')}: {stage.method} scales channels before they are rounded, but"
            f" {stages[first].label} ({stages[first].method}) has rounded {name}; put it first"
        )
    return (
        f"{stage.at('targets')}: {name} already belongs to {stages[first].label}; add it to the"
        " ignore of one of the two"
    )


def _settle_scheme(
    stages: Sequence[Stage], name: str, takers: tuple[int, ...], stage_of: dict[str, int]
) -> None:
    """Find who rounds a layer that `takers` scale, and that all of them mean one scheme."""
    own = [i for i in takers if stages[i].scheme is not None]
    if name not in stage_of:
        if not own:
            stage = stages[takers[-1]]
            raise RecipeError(
                f"{stage.at('scheme')}: is missing, and no later stage rounds {name}; give"
                f" {stage.method} a scheme or add a stage that takes the same layers"
            )
        stage_of[name] = own[-1]
    rounding = stages[stage_of[name]]
    for i in own:
        if stages[i].scheme != rounding.scheme:
            raise RecipeError(
                f"{stages[i].at('scheme')}: is another one than that of {rounding.label}"
                f" ({rounding.method}), which rounds {name}; leave it out here"
            )


def _check_patterns(
    stage: Stage, key: Literal["targets", "ignore"], linears: Sequence[LinearSpec]
) -> None:
    for i, (pattern, means) in enumerate(of_stage(stage, key)):
        if key == "ignore" and pattern in ROLE_OF_WORD:
            continue
        if not any(map(means, linears)):
            names = [linear.name for linear in linears]
            found = _in_part(pattern, names) or f"; {_close(pattern, names)}"
            raise RecipeError(f"{stage.at(f'{key}[{i}]')}: {pattern!r} matches no layer{found}")


def _in_part(pattern: str, names: Sequence[str]) -> str | None:
    """What to say of a regular expression that matches a part of a name: it is for the whole."""
    regex = pattern.removeprefix("re:")
    found = [] if pattern == regex else _matched(regex, "search", names)
    if not found:
        return None
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    said = f": it must match the whole name, and matches only a part of {found[0]}{more}"
    body = f"({regex})" if "|" in regex else regex
    for longer in (f".*{body}", f"{body}.*", f".*{body}.*"):
        if _matched(longer, "fullmatch", found) == found:
            return f"{said}; write 're:{longer}'"
    return f"{said}; put .* in front, behind or both"


def _matched(regex: str, how: Literal["search", "fullmatch"], names: Sequence[str]) -> list[str]:
    """The names that match; none where that takes too long to tell, or it is no expression: flags
    may stand at the start alone."""
    try:
        found = expression(regex, ValueError)
        look = found.search if how == "search" else found.fullmatch
        return [name for name in names if look(name)]
    except ValueError:
        return []


def _close(pattern: str, names: Sequence[str]) -> str:
    """The layer names nearest to a pattern, by full name and by last part."""
    bare = pattern.removeprefix("re:").strip("*.")
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = difflib.get_close_matches(bare, names, n=3, cutoff=0.6)
    if not near:
        near = difflib.get_close_matches(bare.rpartition(".")[2], by_last, n=3, cutoff=0.6)
    if near:
        return f"close ones: {', '.join(near)}"
    shown = list(by_last.values())[:3]
    return f"layers are called, for example, {', '.join(sorted(shown))}"
