"""How a recipe names artifacts for other runtimes: a target, or a mapping with `to`."""

from dataclasses import replace

from compress.errors import RecipeError
from compress.recipe.reader import closest, read_dataclass
from compress.recipe.schema import ExportConfig, Recipe
from compress.recipe.tree import Node, Scalar


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
