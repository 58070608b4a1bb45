"""Stages that choose among schemes: `candidates` and `target` in place of `scheme`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from compress.errors import RecipeError
from compress.quant.scheme import QuantScheme
from compress.recipe.reading.reader import missing, read
from compress.recipe.reading.scheme import SCHEME_KEYS, read_scheme
from compress.recipe.reading.tree import Node, is_mapping, problem
from compress.recipe.schema import Recipe, Sensitivity, Stage, Target


def read_budget(
    stage: Node, keys: Mapping[str, Node], size: Callable[[Node], Node]
) -> dict[str, Any]:
    """The fields of Stage that make it choose; none for a stage with a scheme of its own.

    size: a node like "4GB" as one in plain bytes.
    """
    if "candidates" not in keys and "target" not in keys:
        if "sensitivity" in keys:
            raise problem(keys["sensitivity"], "goes with candidates and target; take it out")
        return {}
    for key in SCHEME_KEYS:
        if key in keys:
            raise problem(keys[key], "candidates stand in its place; give one of the two")
    if "candidates" not in keys:
        raise missing(stage, "candidates", "a list of two schemes or more to choose from")
    found = {"target": SHARED, **read_target(keys, size)}
    if found["target"] == SHARED:
        # As the losses that it is weighed against.
        found = {"sensitivity": "kl", **found}
    return {"candidates": _candidates(keys["candidates"]), **found}


def read_target(keys: Mapping[str, Node], size: Callable[[Node], Node]) -> dict[str, Any]:
    """Of these fields of Stage those that are given."""
    found: dict[str, Any] = {}
    if "target" in keys:
        found["target"] = read(Target, _in_bytes(keys["target"], size))
    if "sensitivity" in keys:
        found["sensitivity"] = read(Sensitivity, keys["sensitivity"])
    return found


SHARED = Target(of="prune")


def check_shared(recipe: Recipe) -> None:
    """RecipeError for candidates that nothing says how many bytes there are for."""
    from compress.edits.prune import PruneConfig

    shared = [stage for stage in recipe.stages if stage.target == SHARED]
    others = [stage for stage in recipe.stages if stage.target not in (None, SHARED)]
    if not shared:
        return
    configs = [x.config for x in recipe.edits if isinstance(x.config, PruneConfig)]
    budgets = [x.budget for x in configs if x.budget is not None and x.budget.bytes is not None]
    if len(budgets) != 1:
        raise RecipeError(
            f"{shared[0].at('target')}: is missing; give {{bits_per_weight: 4.25}} or {{bytes:"
            f" 4GB}}, or put a prune in front whose budget is in bytes, which it then shares"
        )
    if shared[0].sensitivity != "kl":
        raise RecipeError(
            f"{shared[0].at('sensitivity')}: is {shared[0].sensitivity}, and what prune loses is"
            " measured in nats; take kl, or leave it out"
        )
    if len(shared) + len(others) > 1:
        both = [*shared, *others][1]
        raise RecipeError(
            f"{both.at('candidates')}: {shared[0].label} shares the bytes of prune; one stage can"
        )


def check_types(stage: Stage) -> None:
    """RecipeError for a stage that rounds the whole model with half of what makes it choose."""
    candidates, target = stage.config.candidates, stage.target
    if target is None and stage.sensitivity != "output_error":
        raise RecipeError(
            f"{stage.at('sensitivity')}: is {stage.sensitivity}; it goes with candidates and"
            " target, take it out"
        )
    if candidates and target is None:
        raise RecipeError(
            f"{stage.at('target')}: is missing; candidates are chosen by it, {{bytes: 4GB}} of the"
            " file or {bits_per_weight: 4.25} of the blocks' linears"
        )
    if target is not None and not candidates:
        raise RecipeError(
            f"{stage.at('candidates')}: is missing; give two types or more to choose from, as"
            " [Q3_K, Q4_K, Q6_K]"
        )
    if target is not None and target.of is not None:
        raise RecipeError(
            f"{stage.at('target')}: is {target.describe()}, and a whole file shares none; give"
            " bits_per_weight or bytes"
        )


def check_budget(stage: Stage) -> None:
    """RecipeError unless a stage can choose among its candidates."""
    from compress.methods import METHODS

    if stage.scheme is not None:
        raise RecipeError(f"{stage.at('scheme')}: candidates stand in its place; give one of both")
    if stage.target is None:
        raise RecipeError(f"{stage.at('target')}: is missing; candidates are chosen by it")
    at, candidates = stage.at("candidates"), stage.candidates
    if len(set(candidates)) < max(2, len(candidates)):
        raise RecipeError(
            f"{at}: {len(candidates)} schemes of which {len(set(candidates))} differ; give two or"
            " more, each once"
        )
    method = METHODS[stage.method]
    if method.fold is not None:
        raise RecipeError(
            f"{at}: {stage.method} scales channels for all layers alike; give the candidates to a"
            " stage behind it that rounds (rtn or gptq)"
        )
    for i, scheme in enumerate(candidates):
        reason = method.why_not(scheme)
        if reason is not None:
            place = stage.at(f"candidates[{i}]")
            raise RecipeError(f"{place}: is {scheme.describe()}, but {stage.method} {reason}")
        if scheme.activation != candidates[0].activation:
            raise RecipeError(
                f"{stage.at(f'candidates[{i}]')}: is {scheme.describe()}, which treats inputs"
                f" otherwise than {candidates[0].describe()}; what that loses is not measured"
            )


def _candidates(node: Node) -> tuple[QuantScheme, ...]:
    """Presets or mappings, as `scheme` takes them."""
    if not isinstance(node.content, tuple):
        raise problem(node, f"is {node.shown()}; it takes a list of schemes")
    return tuple(read_scheme(item, {"scheme": item}) for item in node.content)


def _in_bytes(node: Node, size: Callable[[Node], Node]) -> Node:
    """A target whose `bytes` is a plain number."""
    if not is_mapping(node.content) or "bytes" not in node.content:
        return node
    keys = {key: size(x) if key == "bytes" else x for key, x in node.content.items()}
    return replace(node, content=keys)
