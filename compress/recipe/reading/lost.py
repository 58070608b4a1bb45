"""A key that stands beside the place it belongs to: which it may have meant is said."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from compress.quant.scheme import QuantScheme
from compress.recipe.evaluation_config import EvaluationConfig
from compress.recipe.reading.reader import field_names
from compress.recipe.reading.stages import keys_of_stage
from compress.recipe.reading.tree import Node, Scalar, is_mapping, problem
from compress.recipe.schema import OutputConfig
from compress_calibration.config import CalibrationConfig

SECTIONS: Mapping[str, type] = MappingProxyType(
    {"calibration": CalibrationConfig, "evaluation": EvaluationConfig, "output": OutputConfig}
)


def refuse_lost(keys: Mapping[str, Node], known: tuple[str, ...]) -> None:
    """RecipeError for a key beside the stages, none of `known`, and for one in a stage, that is one
    of a stage, of a scheme or of a section. Others are not judged here."""
    stages = keys["stages"].content if "stages" in keys else ()
    stages = stages if isinstance(stages, tuple) else ()
    lost = next((key for key in keys if key not in known), None)
    if lost is not None:
        _refuse(lost, keys[lost], list(_of_stages(lost, stages)))
        sections = (f"{x}: {x}.{lost}" for x, cls in SECTIONS.items() if lost in field_names(cls))
        _refuse(lost, keys[lost], [*_of_schemes(lost, keys[lost], stages), *sections])
    for stage in stages:
        inside, allowed = _keys(stage), keys_of_stage(stage)
        for key in (x for x in inside if allowed and x not in allowed):
            _refuse(key, inside[key], list(_of_schemes(key, inside[key], (stage,))))


def _refuse(key: str, node: Node, found: list[str]) -> None:
    if found:
        raise problem(node, f"unknown key {key!r}; it is one of {', or of '.join(found)}")


def _of_stages(key: str, stages: tuple[Node, ...]) -> Iterator[str]:
    """The first stage that may have it."""
    place = next((x.path for x in stages if key in keys_of_stage(x)), None)
    if place is not None:
        yield f"a stage: {place}.{key}"


def _of_schemes(key: str, node: Node, stages: tuple[Node, ...]) -> Iterator[str]:
    """The first stage with a scheme, which may be a mapping."""
    place = next((x.path for x in stages if "scheme" in _keys(x)), None)
    if place is not None and key in field_names(QuantScheme):
        value = node.content.text if isinstance(node.content, Scalar) else "..."
        yield f"a scheme: {place}.scheme={{{key}: {value[:60]}}}"


def _keys(stage: Node) -> Mapping[str, Node]:
    return stage.content if is_mapping(stage.content) else {}
