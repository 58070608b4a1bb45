"""Which layers a stage takes.

A pattern is a glob over a layer's full name ("model.layers.0.*") or over its last parts
("down_proj", "self_attn.*_proj"), or "re:" and a regular expression for the full name. The words
"lm_head" and "router" also mean the output head and the routers, whatever they are called.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from compress.arch.spec import LinearSpec
from compress.errors import RecipeError
from compress.recipe.schema import Stage

ROLE_OF_WORD: Mapping[str, str] = {"lm_head": "head", "router": "router"}
NO_STAGE = "no stage targets it"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Stages by layer name.

    stage_of: the one that rounds the layer. folds_of: those that scale its channels before, in
    order; empty for most. reason_of: why a layer that no stage rounds is left.
    """

    stage_of: Mapping[str, int]
    folds_of: Mapping[str, tuple[int, ...]]
    reason_of: Mapping[str, str]


def matches(pattern: str, linear: LinearSpec) -> bool:
    """Whether a pattern means this layer."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], linear.name) is not None
    if ROLE_OF_WORD.get(pattern) == linear.role:
        return True
    return fnmatchcase(linear.name, pattern) or fnmatchcase(linear.name, f"*.{pattern}")


def select(stage: Stage, linears: Iterable[LinearSpec]) -> tuple[list[str], dict[str, str]]:
    """Names of the layers a stage takes, and for those it targets but ignores, the reason.

    Raises RecipeError for a pattern that means no layer (the two role words may, in `ignore`: a
    model with tied embeddings has no head) and for a stage whose targets are all ignored.
    """
    linears = list(linears)
    targeted = [x for x in linears if any(matches(p, x) for p in stage.targets)]
    _check_patterns(stage, "targets", linears)
    _check_patterns(stage, "ignore", linears)
    taken, ignored = [], {}
    for linear in targeted:
        by = next((p for p in stage.ignore if matches(p, linear)), None)
        if by is None:
            taken.append(linear.name)
        else:
            ignored[linear.name] = f"ignored by {by!r} in stages[{stage.index}].ignore"
    if not taken:
        raise RecipeError(
            f"{stage.at('targets')}: all {len(targeted)} layers it names are in this stage's"
            f" ignore ({', '.join(map(repr, stage.ignore))}); set ignore to what it should leave"
        )
    return taken, ignored


def assign(stages: Sequence[Stage], linears: Iterable[LinearSpec]) -> Assignment:
    """The stages of every layer.

    A layer is rounded once, and scaled before that. Where no stage rounds what another scales, the
    scaling stage does so itself, to its own scheme. RecipeError where that is not so.
    """
    linears = list(linears)
    stage_of: dict[str, int] = {}
    folds_of: dict[str, tuple[int, ...]] = {}
    reasons: dict[str, str] = {}
    for i, stage in enumerate(stages):
        taken, ignored = select(stage, linears)
        for name in taken:
            if name in stage_of:
                raise RecipeError(_taken_twice(stages, stage, name, stage_of[name]))
            if not _scales(stage):
                stage_of[name] = i
            else:
                folds_of[name] = (*folds_of.get(name, ()), i)
        reasons |= ignored
    for name, folds in folds_of.items():
        _settle_scheme(stages, name, folds, stage_of)
    left = {x.name: reasons.get(x.name, NO_STAGE) for x in linears if x.name not in stage_of}
    return Assignment(stage_of, folds_of, left)


def _scales(stage: Stage) -> bool:
    """Whether the stage scales channels; late, because methods bring torch."""
    from compress.methods import METHODS

    return METHODS[stage.method].fold is not None


def _taken_twice(stages: Sequence[Stage], stage: Stage, name: str, first: int) -> str:
    if _scales(stage):
        return (
            f"{stage.at('method')}: {stage.method} scales channels before they are rounded, but"
            f" stages[{first}] ({stages[first].method}) has rounded {name}; put it first"
        )
    return (
        f"{stage.at('targets')}: {name} already belongs to stages[{first}]; add it to the ignore"
        " of one of the two"
    )


def _settle_scheme(
    stages: Sequence[Stage], name: str, folds: tuple[int, ...], stage_of: dict[str, int]
) -> None:
    """Find who rounds a layer that `folds` scale, and that all of them mean one scheme."""
    own = [i for i in folds if stages[i].scheme is not None]
    if name not in stage_of:
        if not own:
            stage = stages[folds[-1]]
            raise RecipeError(
                f"{stage.at('scheme')}: is missing, and no later stage rounds {name}; give"
                f" {stage.method} a scheme or add a stage that takes the same layers"
            )
        stage_of[name] = own[-1]
    rounding = stages[stage_of[name]]
    for i in own:
        if stages[i].scheme != rounding.scheme:
            raise RecipeError(
                f"{stages[i].at('scheme')}: is another one than that of stages[{rounding.index}]"
                f" ({rounding.method}), which rounds {name}; leave it out here"
            )


def _check_patterns(stage: Stage, key: str, linears: Sequence[LinearSpec]) -> None:
    for i, pattern in enumerate(getattr(stage, key)):
        if key == "ignore" and pattern in ROLE_OF_WORD:
            continue
        if not any(matches(pattern, linear) for linear in linears):
            raise RecipeError(
                f"{stage.at(f'{key}[{i}]')}: {pattern!r} matches no layer;"
                f" {_close(pattern, [linear.name for linear in linears])}"
            )


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
