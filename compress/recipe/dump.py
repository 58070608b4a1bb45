"""A Recipe as canonical YAML: complete, and read again as an equal Recipe."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from compress.recipe.keys import key_of
from compress.recipe.schema import Recipe, Stage


def dump(recipe: Recipe) -> str:
    """YAML text with every value spelled out, defaults too; paths are absolute."""
    data: dict[str, Any] = {"name": recipe.name}
    if recipe.description:
        data["description"] = recipe.description
    data["seed"] = recipe.seed
    rounding = [_stage(x, recipe.stages) for x in recipe.stages if not x.within]
    edits, tuning = (
        [{"method": x.method, **_plain(x.config)} for x in some]
        for some in (recipe.edits, recipe.tuning)
    )
    data["stages"] = [*edits, *rounding, *tuning]
    if recipe.kv_cache is not None:
        data["kv_cache"] = recipe.kv_cache
    for part in ("calibration", "evaluation", "output"):
        value = getattr(recipe, part)
        if value is not None:
            data[part] = _plain(value)
    if recipe.export:
        data["export"] = _plain(recipe.export)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)


def _stage(stage: Stage, stages: Sequence[Stage]) -> dict[str, Any]:
    # Late: what a recipe can name is told without torch.
    from compress.methods import METHODS

    if METHODS[stage.method].whole:
        budget = {k: v for k, v in _budget(stage).items() if k != "candidates"}
        return {"method": stage.method, **budget, **_plain(stage.config)}
    return {
        "method": stage.method,
        **_scheme(stage),
        **_budget(stage),
        "targets": list(stage.targets),
        "ignore": list(stage.ignore),
        **_plain(stage.config),
        **({"overrides": list(_overrides(stage, stages))} if stage.claims else {}),
    }


def _overrides(stage: Stage, stages: Sequence[Stage]) -> Iterator[dict[str, Any]]:
    """The overrides of a stage, each complete, in the order in which they were given."""
    parts = iter([x for x in stages if x.within and x.base == stage.label])
    for claim in stage.claims:
        targets = {"targets": list(claim.targets)}
        if claim.skip:
            yield {**targets, "skip": True}
        else:
            part = next(parts)
            yield {**targets, **_scheme(part), **_every_option(part.config)}


def _every_option(config: Any) -> dict[str, Any]:
    """The empty ones too: what an override leaves out is its stage's, not the default."""
    return {key_of(item): _plain(getattr(config, item.name)) for item in fields(config)}


def _scheme(stage: Stage) -> dict[str, Any]:
    return {} if stage.scheme is None else {"scheme": _plain(stage.scheme)}


def _budget(stage: Stage) -> dict[str, Any]:
    if stage.target is None:
        return {}
    return {
        "candidates": _plain(stage.candidates),
        "target": _plain(stage.target),
        "sensitivity": stage.sensitivity,
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        # A field left empty by default says nothing; some kinds of source even refuse it.
        return {
            key_of(item): _plain(getattr(value, item.name))
            for item in fields(value)
            if not _is_empty_default(getattr(value, item.name), item.default)
        }
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _is_empty_default(value: Any, default: Any) -> bool:
    return value == default and (value is None or value in ("", ()))
