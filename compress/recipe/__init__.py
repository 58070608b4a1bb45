"""Recipes: what to do to a checkpoint. Strict YAML in, complete dataclasses out."""

from compress.recipe.dump import dump
from compress.recipe.lookup import Builtin, builtin, builtin_names, load
from compress.recipe.reading.parse import parse
from compress.recipe.schema import EditStage, ExportConfig, OutputConfig, Places, Recipe, Stage

__all__ = [
    "Builtin",
    "EditStage",
    "ExportConfig",
    "OutputConfig",
    "Places",
    "Recipe",
    "Stage",
    "builtin",
    "builtin_names",
    "dump",
    "load",
    "parse",
]
