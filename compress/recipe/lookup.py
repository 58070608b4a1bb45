"""From what a user types to a Recipe: a file, or the name of a built-in one."""

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from compress.checkpoint.regular import read_regular, usable
from compress.errors import RecipeError
from compress.recipe.reading.exports import with_signs
from compress.recipe.reading.parse import check, parse
from compress.recipe.reading.reader import closest, nearest
from compress.recipe.reading.tree import MAX_CHARACTERS, Origin, Scalar, is_mapping, read_tree
from compress.recipe.schema import Recipe

PACKAGE = "compress_recipes"
_SUFFIXES = (".yaml", ".yml")
MOST_BYTES = 4 * MAX_CHARACTERS


@dataclass(frozen=True, slots=True)
class Builtin:
    """A recipe that comes with compress-model; text is its file, header comment included."""

    name: str
    description: str
    text: str


def load(recipe: Recipe | str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """The Recipe that is meant, with "key=value" overrides in place.

    A string is a path when such a file exists or when it looks like one (a slash, .yaml), else
    the name of a built-in recipe. Raises RecipeError with the place of any mistake.
    """
    if not isinstance(recipe, Recipe | str | Path):
        raise RecipeError(
            f"recipe is {recipe!r}; it takes a Recipe, a file or the name of a built-in one"
        )
    if isinstance(overrides, str):
        raise RecipeError(f"overrides is {overrides!r}; it takes a list of texts 'KEY=VALUE'")
    overrides = tuple(overrides)
    if isinstance(recipe, Recipe):
        if overrides:
            raise RecipeError(
                f"--set {overrides[0]}: recipe {recipe.name!r} is already parsed; change it with"
                " dataclasses.replace"
            )
        check(recipe)
        return with_signs(recipe)
    if isinstance(recipe, Path) or not recipe.strip() or _is_path(recipe):
        path = usable(recipe, "recipe", RecipeError)
        return parse(_read(path), label=str(recipe), folder=path.parent, overrides=overrides)
    found = builtin(recipe)
    return parse(found.text, label=f"{PACKAGE}/{found.name}.yaml", overrides=overrides)


def builtin_names() -> list[str]:
    """Names of the built-in recipes, sorted."""
    entries = _folder().iterdir()
    return sorted(entry.name[: -len(".yaml")] for entry in entries if entry.name.endswith(".yaml"))


def builtin(name: str) -> Builtin:
    """A built-in recipe by name; RecipeError lists the close ones."""
    names = builtin_names()
    if name not in names:
        raise RecipeError(
            f"no recipe {name!r}: there is no such file, and built in are {', '.join(names)}"
            f"{nearest(name, names)}"
        )
    text = (_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    return Builtin(name, _description(text, name), text)


def _is_path(text: str) -> bool:
    # Not Path.is_file: it raises for what is too long to be one.
    return text.endswith(_SUFFIXES) or "/" in text or "\\" in text or os.path.isfile(text)


def _read(path: Path) -> str:
    try:
        return read_regular(path, MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe file{_hint(path)}") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot read the recipe: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: cannot read the recipe: it is not UTF-8 text") from None


def _hint(path: Path) -> str:
    """A built-in name that was typed as a file name, or a neighbour with a close spelling."""
    names = builtin_names()
    if path.stem in names:
        return f"; the built-in recipe is called {path.stem!r}"
    folder = path.parent
    beside = [p for p in folder.iterdir() if p.suffix in _SUFFIXES] if folder.is_dir() else []
    # By stems: the suffix alone would make any two short names alike.
    found = closest(path.stem, [p.stem for p in beside])
    if found is not None:
        name = next(p.name for p in beside if p.stem == found)
        return f"; did you mean {name!r}?"
    return nearest(path.stem, names)


def _description(text: str, name: str) -> str:
    root = read_tree(text, Origin(f"{PACKAGE}/{name}.yaml", Path()))
    node = root.content.get("description") if is_mapping(root.content) else None
    return node.content.text if node is not None and isinstance(node.content, Scalar) else ""


def _folder() -> Traversable:
    """The installed package, or the folder beside `compress` in a checkout."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return files(PACKAGE)
    return Path(__file__).resolve().parents[2] / "recipes"
