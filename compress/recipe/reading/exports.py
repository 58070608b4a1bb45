"""How a recipe names artifacts for other runtimes, and what they ask of its stages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from compress.errors import RecipeError
from compress.quant.scheme import Signs
from compress.recipe.reading.reader import closest, read_dataclass
from compress.recipe.reading.tree import Node, Scalar
from compress.recipe.schema import ExportConfig, HasSigns, Recipe, Stage

if TYPE_CHECKING:
    from compress_exporters.exporter import Exporter


def read_exports(node: Node | None) -> tuple[ExportConfig, ...]:
    """The export section; one bare entry is a list of one."""
    if node is None:
        return ()
    items = node.content if isinstance(node.content, tuple) else (node,)
    return tuple(read_dataclass(ExportConfig, _long_form(item)) for item in items)


def _long_form(node: Node) -> Node:
    if not isinstance(node.content, Scalar) or node.is_null:
        return node
    target = Node(node.origin, node.line, node.child("to"), node.content)
    return replace(node, content={"to": target})


def any_rounds(exports: Sequence[ExportConfig]) -> bool:
    """Whether any rounds dense weights, by calibration data where there are some."""
    return any(export.type is not None for export in exports)


def check_exports(recipe: Recipe) -> None:
    """RecipeError, with its place, for a target that there is not, and for one named twice."""
    # Late: the table's rows import torch.
    from compress_exporters.table import EXPORTERS

    seen = set[str]()
    for place, export in enumerate(recipe.export):
        at = recipe.at(f"export[{place}].to")
        if export.to not in EXPORTERS:
            near = closest(export.to, EXPORTERS)
            hint = "" if near is None else f"; did you mean {near!r}?"
            raise RecipeError(f"{at}: is {export.to!r}; allowed: {', '.join(EXPORTERS)}{hint}")
        if export.to in seen:
            raise RecipeError(f"{at}: is {export.to!r} again; each target has one folder")
        seen.add(export.to)
        _check_options(recipe, f"export[{place}]", export, EXPORTERS[export.to])


def _check_options(recipe: Recipe, at: str, export: ExportConfig, target: "Exporter") -> None:
    """RecipeError for a choice that the target does not have."""
    if export.dtype is not None and export.dtype not in target.dtypes:
        place, known = recipe.at(f"{at}.dtype"), ", ".join(target.dtypes)
        raise RecipeError(f"{place}: is {export.dtype!r}; {export.to} has {known}")
    for name, value in (("embedding", export.embedding), ("type", export.type)):
        if value is not None and not target.blocks:
            place = recipe.at(f"{at}.{name}")
            raise RecipeError(f"{place}: is {value!r}; it is for gguf, leave it out")
    if export.type is not None and recipe.stages:
        stage = recipe.stages[0]
        raise RecipeError(
            f"{recipe.at(f'{at}.type')}: is {export.type!r}, which rounds dense weights, and"
            f" {stage.method} has rounded them; leave it out, or take the stage k_quants alone"
        )


def with_signs(recipe: Recipe) -> Recipe:
    """The recipe with the signs of scales settled: "auto" is "positive" where an export's target
    asks for that, else "both"."""
    signs: Signs = "positive" if _wants_positive(recipe) else "both"
    stages = tuple(_settled(stage, signs) for stage in recipe.stages)
    return recipe if stages == recipe.stages else replace(recipe, stages=stages)


def _wants_positive(recipe: Recipe) -> bool:
    if not recipe.export:
        return False
    from compress_exporters.table import EXPORTERS

    return any(EXPORTERS[export.to].positive_scales for export in recipe.export)


def _settled(stage: Stage, signs: Signs) -> Stage:
    if not isinstance(stage.config, HasSigns) or stage.signs != "auto":
        return stage
    options: Any = stage.config
    return replace(stage, config=replace(options, signs=signs))
