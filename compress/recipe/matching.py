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
    """stage_of: layer name -> index of its stage; reason_of: why each other layer is left."""

    stage_of: Mapping[str, int]
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
    """The stage of every layer; RecipeError when two stages claim the same one."""
    linears = list(linears)
    stage_of: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for i, stage in enumerate(stages):
        taken, ignored = select(stage, linears)
        for name in taken:
            if name in stage_of:
                raise RecipeError(
                    f"{stage.at('targets')}: {name} already belongs to stages[{stage_of[name]}];"
                    f" add it to the ignore of one of the two"
                )
            stage_of[name] = i
        reasons |= ignored
    left = {x.name: reasons.get(x.name, NO_STAGE) for x in linears if x.name not in stage_of}
    return Assignment(stage_of, left)


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
