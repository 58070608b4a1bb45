"""The stages of a recipe: those that edit the model, those that round its layers, and trainings of
what these leave."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from compress.byte_sizes import EXPECTED, byte_size, plain_count
from compress.errors import RecipeError
from compress.quant.scheme import QuantScheme
from compress.recipe.reading.budget import read_budget, read_target
from compress.recipe.reading.data import source_list
from compress.recipe.reading.patterns import read_patterns
from compress.recipe.reading.reader import (
    check_keys,
    field_names,
    given,
    make,
    missing,
    nearest,
    read,
    read_fields,
)
from compress.recipe.reading.scheme import SCHEME_KEYS, read_scheme
from compress.recipe.reading.splitting import split
from compress.recipe.reading.tree import Node, Scalar, is_mapping, problem
from compress.recipe.schema import (
    DEFAULT_TARGETS,
    EditStage,
    Places,
    Recipe,
    Stage,
    default_ignore,
)

TARGET_KEYS = ("target", "sensitivity")
BUDGET_KEYS = ("candidates", *TARGET_KEYS)
# What null takes out, as if the key was not there.
STAGE_SECTIONS = ("scheme", "candidates", "target", "targets", "ignore", "overrides")
STAGE_KEYS = ("method", *SCHEME_KEYS, *BUDGET_KEYS, "targets", "ignore", "overrides")
# Edits that say all of what they change at once.
ONCE = ("hybrid", "gqa")


@dataclass(frozen=True, slots=True)
class StageLists:
    """The stages in their three parts, each in the recipe's order."""

    edits: list[EditStage] = field(default_factory=list)
    rounding: list[Stage] = field(default_factory=list)
    tuning: list[EditStage] = field(default_factory=list)


def read_stages(root: Node, keys: Mapping[str, Node], places: Places) -> StageLists:
    """All stages; RecipeError for one at a place that is not its own."""
    if "stages" not in keys:
        raise missing(root, "stages", "a list of at least one stage")
    node = keys["stages"]
    if not isinstance(node.content, tuple):
        raise problem(node, f"is {node.shown()}; it takes a list of stages (- method: ...)")
    found = StageLists()
    for i, item in enumerate(node.content):
        edit = _read_edit(item, i, places)
        if edit is None:
            _refuse_behind_tuning(item, found)
            found.rounding.extend(_read_stage(item, places))
        elif is_tuning(edit):
            _refuse_in_front(item, edit, found)
            found.tuning.append(edit)
        else:
            _refuse_behind(item, edit, found)
            found.edits.append(edit)
    rounding = [replace(stage, index=i) for i, stage in enumerate(found.rounding)]
    return replace(found, rounding=rounding)


def keys_of_stage(node: Node) -> tuple[str, ...]:
    """The keys that a stage may have, by its method; none where that is not known."""
    from compress.edits import EDITS
    from compress.methods import METHODS

    word = node.content.get("method") if is_mapping(node.content) else None
    method = word.content.text if word is not None and isinstance(word.content, Scalar) else ""
    if method in METHODS:
        common = ("method", *TARGET_KEYS) if METHODS[method].whole else STAGE_KEYS
        return (*common, *field_names(METHODS[method].config))
    return field_names(EDITS[method].config) if method in EDITS else ()


def is_tuning(edit: EditStage) -> bool:
    """Whether it trains what the stages that round have left."""
    from compress.edits.distill import DistillConfig

    return isinstance(edit.config, DistillConfig) and edit.config.tunes


def _refuse_behind_tuning(node: Node, before: StageLists) -> None:
    if before.tuning:
        raise problem(
            node,
            f"rounds layers, and {before.tuning[0].label} trains what is rounded; put it in front",
        )


def _refuse_in_front(node: Node, edit: EditStage, before: StageLists) -> None:
    if not before.rounding:
        raise problem(
            node,
            f"trains {' and '.join(edit.config.train)} of rounded layers, and no stage in front of"
            " it rounds; put one there, or train all",
        )


def _refuse_behind(node: Node, edit: EditStage, before: StageLists) -> None:
    if not before.rounding:
        return
    what = f"{edit.method} changes the model itself"
    remedy = "put it in front"
    if edit.method == "distill":
        what = f"distill trains weights ({', '.join(edit.config.train)})"
        remedy += ", or train some of [rounding, scales, norms]"
    raise problem(node, f"{what}, and {before.rounding[0].label} rounds its layers; {remedy}")


def check_edits(recipe: Recipe) -> None:
    """RecipeError for edits that no table has, as a Recipe built in Python may hold, and for stages
    beside one that rounds the whole model."""
    from compress.edits import EDITS

    _check_whole(recipe)

    edits = recipe.edits
    if not isinstance(edits, tuple) or not all(isinstance(stage, EditStage) for stage in edits):
        raise RecipeError(f"{recipe.at('stages')}: is {edits!r}; edits take a tuple of EditStage")
    for method in ONCE:
        for stage in [stage for stage in edits if stage.method == method][1:]:
            raise RecipeError(f"{stage.at('method')}: is a second {method}; one of them says all")
    for stage in (*edits, *recipe.tuning):
        if is_tuning(stage) != (stage in recipe.tuning):
            what = "what rounding left is trained behind it, all else before it"
            raise RecipeError(f"{stage.at('train')}: is {stage.config.train}; {what}")
        if stage.method not in EDITS:
            known = ", ".join(EDITS)
            raise RecipeError(f"{stage.at('method')}: is {stage.method!r}; allowed: {known}")
        wanted = EDITS[stage.method].config
        if not isinstance(stage.config, wanted):
            raise RecipeError(
                f"{stage.label}: config is {stage.config!r}; {stage.method} takes {wanted.__name__}"
            )


def _check_whole(recipe: Recipe) -> None:
    """A stage that rounds the whole model is the only one that rounds, and the last of all."""
    from compress.methods import METHODS

    known = (x for x in recipe.stages if x.method in METHODS)
    whole = next((x for x in known if METHODS[x.method].whole), None)
    if whole is None:
        return
    labels = [*(x.label for x in recipe.stages), *(x.label for x in recipe.tuning)]
    others = [label for label in labels if label != whole.label]
    if others:
        raise RecipeError(
            f"{whole.at('method')}: {whole.method} rounds the whole model, and {others[0]} is"
            " beside it; take either out"
        )
    if recipe.export:
        raise RecipeError(
            f"{recipe.at('export')}: what {whole.method} writes is a GGUF file, of which nothing is"
            " made; take it out, or export the dense checkpoint"
        )


def _read_edit(node: Node, index: int, places: Places) -> EditStage | None:
    """None for a stage that rounds."""
    # Late: what a recipe can name is told without torch.
    from compress.edits import EDITS

    keys = given(node, STAGE_SECTIONS)
    word = keys["method"].content if "method" in keys else None
    if not isinstance(word, Scalar) or word.text not in EDITS:
        return None
    config = EDITS[word.text].config
    check_keys(node, keys, ("method", *field_names(config)))
    if "budget" in keys:
        keys["budget"] = _in_numbers(keys["budget"])
    if "tokens" in keys:
        keys["tokens"] = as_count(keys["tokens"])
    if "sources" in keys:
        keys["sources"] = source_list(keys["sources"])
    for several in keys.keys() & {"scope", "train"}:
        keys[several] = as_list(keys[several])
    return EditStage(word.text, make(config, read_fields(config, node, keys), node), index, places)


def _read_stage(node: Node, places: Places) -> Iterator[Stage]:
    """The stage, and those that its overrides are."""
    from compress.edits import EDITS, NOT_CARRIED
    from compress.methods import METHODS

    keys, known = given(node, STAGE_SECTIONS), (*METHODS, *EDITS)
    if "method" not in keys:
        check_keys(node, keys, STAGE_KEYS)
        raise missing(node, "method", "one of " + ", ".join(known))
    method = str(read(str, keys["method"]))
    if method in NOT_CARRIED:
        raise problem(keys["method"], f"is {method!r}: {NOT_CARRIED[method]}")
    if method not in METHODS:
        raise problem(
            keys["method"],
            f"unknown method {method!r}; allowed: {', '.join(known)}{nearest(method, known)}",
        )
    config = METHODS[method].config
    if METHODS[method].whole:
        check_keys(node, keys, ("method", *TARGET_KEYS, *field_names(config)))
        options: Any = make(config, read_fields(config, node, keys), node)
        by = read_target(keys, as_bytes)
        return iter([Stage(method, options, None, path=node.path, places=places, **by)])
    check_keys(node, keys, (*STAGE_KEYS, *field_names(config)))
    targets = _targets(keys.get("targets"))
    stage = Stage(
        method=method,
        config=make(config, read_fields(config, node, keys), node),
        scheme=_scheme(node, keys, METHODS[method].fold is not None),
        **read_budget(node, keys, as_bytes),
        targets=targets,
        ignore=read_patterns(keys["ignore"]) if "ignore" in keys else default_ignore(targets),
        path=node.path,
        places=places,
    )
    return split(stage, keys.get("overrides"))


def _scheme(node: Node, keys: Mapping[str, Node], may_lack: bool) -> QuantScheme | None:
    if "candidates" in keys or "target" in keys:
        return None
    if may_lack and not any(key in keys for key in SCHEME_KEYS):
        return None
    return read_scheme(node, keys)


def _targets(node: Node | None) -> tuple[str, ...]:
    patterns = DEFAULT_TARGETS if node is None else read_patterns(node)
    if node is not None and not patterns:
        raise problem(node, "is empty; leave it out to take all layers of the blocks")
    return patterns


def as_list(node: Node) -> Node:
    """One word as a list of one."""
    return node if isinstance(node.content, tuple) else replace(node, content=(node,))


def as_count(node: Node) -> Node:
    """A number like "3M" or "300k" as the same node in plain digits; any other as it is."""
    text = node.content.text if isinstance(node.content, Scalar) else ""
    count = plain_count(text)
    return node if count is None else replace(node, content=Scalar(str(count)))


def _in_numbers(node: Node) -> Node:
    """A budget with its numbers as plain digits: "5GB" of bytes, "3M" of parameters."""
    if not is_mapping(node.content):
        return node
    keys = {key: _as_size(x) if "bytes" in key else as_count(x) for key, x in node.content.items()}
    return replace(node, content=keys)


def _as_size(node: Node) -> Node:
    """A size with its unit as plain bytes; any other number as it is."""
    text = node.content.text if isinstance(node.content, Scalar) else ""
    return as_bytes(node) if text[-1:].isalpha() else node


def as_bytes(node: Node) -> Node:
    """A size like "5GB" as the same node in plain bytes."""
    text = node.content.text if isinstance(node.content, Scalar) else ""
    size = byte_size(text)
    if size is None:
        raise problem(node, f"is {node.shown()}; {EXPECTED}")
    return Node(node.origin, node.line, node.path, Scalar(str(size)))
