"""`overrides` of a stage: each is a stage of its own, with what it does not name from that stage.

Together they share out the layers of the stage: a later override wins over an earlier one, and
the stage keeps what none of them takes. The rest of the program sees ordinary stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from compress.quant.scheme import QuantScheme
from compress.recipe.reading.patterns import read_patterns
from compress.recipe.reading.reader import (
    check_keys,
    field_names,
    given,
    make,
    mapping,
    missing,
    read,
    read_fields,
    sections,
)
from compress.recipe.reading.scheme import CHANGES, change_scheme
from compress.recipe.reading.tree import Node, problem
from compress.recipe.schema import DEFAULT_IGNORE, Claim, Stage

KEYS = ("targets", "skip", "scheme", *CHANGES)


def split(stage: Stage, node: Node | None) -> Iterator[Stage]:
    """The stage, then one for each of its overrides that does not skip.

    node: the value of `overrides`, None where there is none. RecipeError with the place of any
    mistake in it.
    """
    items = _items(node)
    claims = tuple(_claim(item, stage) for item in items)
    yield replace(stage, claims=claims)
    for i, item in enumerate(items):
        if not claims[i].skip:
            yield replace(
                stage,
                config=_config(item, stage.config),
                scheme=_scheme(item, stage),
                candidates=(),
                target=None,
                sensitivity="output_error",
                targets=claims[i].targets,
                ignore=claims[i].ignore,
                within=stage.targets,
                claims=claims[i + 1 :],
                path=item.path,
            )


def _items(node: Node | None) -> Sequence[Node]:
    if node is None:
        return ()
    if not isinstance(node.content, tuple):
        raise problem(
            node, f"is {node.shown()}; it takes a list of mappings (- {{targets: [...], bits: 8}})"
        )
    return node.content


def _claim(node: Node, stage: Stage) -> Claim:
    """Which layers an override takes; its keys are checked too."""
    keys = _given(node, stage)
    check_keys(node, keys, (*KEYS, *field_names(type(stage.config))))
    if "targets" not in keys:
        raise missing(node, "targets", "a list of patterns of the layers it is for")
    skip = bool(read(bool, keys["skip"])) if "skip" in keys else False
    changes = [key for key in keys if key not in ("targets", "skip")]
    if skip and changes:
        raise problem(keys[changes[0]], "does nothing beside skip: true; give one of the two")
    if not skip and not changes:
        raise problem(node, "changes nothing; give what is different, or skip: true")
    targets = read_patterns(keys["targets"])
    if not targets:
        raise problem(keys["targets"], "is empty; name the layers that the override is for")
    # Who names the output head means it, though the stage leaves heads alone.
    named = set(DEFAULT_IGNORE).intersection(targets)
    ignore = tuple(pattern for pattern in stage.ignore if pattern not in named)
    return Claim(targets, ignore, skip, node.path)


def _given(node: Node, stage: Stage) -> dict[str, Node]:
    """The keys of an override; null takes a section out, so that it is the stage's."""
    return given(node, ("scheme", *sections(type(stage.config))))


def _config(node: Node, base: Any) -> Any:
    """The options of the stage with those of the override in their place."""
    names = field_names(type(base))
    values = {name: getattr(base, name) for name in names}
    own = {name: value for name, value in mapping(node).items() if name in names}
    return make(type(base), values | read_fields(type(base), node, own), node)


def _scheme(node: Node, stage: Stage) -> QuantScheme | None:
    scheme = change_scheme(node, _given(node, stage), stage.scheme)
    if scheme is None and stage.target is not None:
        raise problem(
            node,
            "has no scheme, and its layers are none of those the stage's target counts; give the"
            " override a scheme, or skip: true",
        )
    return scheme
