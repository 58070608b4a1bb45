"""The shape of the code: small files and functions, one way of imports, documents that are true."""

import ast
import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from click import Context, Option

import compress
from compress.cli.main import COMMANDS, cli
from compress.methods import METHODS
from compress.recipe import builtin_names

REPO = Path(__file__).resolve().parents[1]
ROOTS = tuple(
    REPO / name for name in ("compress", "calibration", "exporters", "kernels", "benchmarks")
)
PACKAGES = ("compress", "compress_calibration", "compress_exporters", "compress_kernels")
FILE_LINES, FEW_FILES, FILE_LIMIT = 300, 5, 400
FOLDER_FILES = 20
CODE = {".py", ".cpp", ".h"}
FUNCTION_LINES, FUNCTION_LIMIT, MEDIAN = 40, 60, 12
PARAMETERS = 6
DOCUMENTS = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]


def sources() -> Iterator[Path]:
    for root in ROOTS:
        yield from sorted(root.rglob("*.py"))


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions() -> dict[str, int]:
    """Place -> lines, of every function outside the tests."""
    found = {}
    for path in sources():
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                place = f"{path.relative_to(REPO)}:{node.lineno} {node.name}"
                found[place] = node.end_lineno - node.lineno + 1
    return found


def test_files_are_short() -> None:
    lines = {str(p.relative_to(REPO)): len(p.read_text().splitlines()) for p in sources()}
    assert {name: n for name, n in lines.items() if n > FILE_LIMIT} == {}
    long = {name: n for name, n in lines.items() if n > FILE_LINES}
    assert len(long) <= FEW_FILES, long


def test_functions_are_short() -> None:
    lines = functions()
    assert {place: n for place, n in lines.items() if n > FUNCTION_LIMIT} == {}
    assert sum(n > FUNCTION_LINES for n in lines.values()) <= len(lines) / 50
    assert sorted(lines.values())[len(lines) // 2] <= MEDIAN


def takes_what_it_must(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Triton's kernels and click's commands get by name what they cannot get bundled."""
    marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
    return "triton.jit" in marks or "click." in marks


def parameters(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, int]]:
    """Function -> how many parameters it has, `self` aside, of all in a syntax tree."""
    for node in ast.iter_child_nodes(tree):
        inner = outer
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{outer}.{node.name}" if outer else node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            if not takes_what_it_must(node):
                yield inner, len(names) - (names[:1] in (["self"], ["cls"]))
        yield from parameters(node, inner)


def test_functions_take_few_parameters() -> None:
    """Calls into C are no definitions, so none counts here."""
    found = {}
    for path in sources():
        for name, count in parameters(syntax(path)):
            if count > PARAMETERS:
                found[f"{path.relative_to(REPO)} {name}"] = count
    assert found == {}, "group what travels together in a dataclass"


@pytest.mark.parametrize("name", compress.__all__)
def test_no_room_takes_the_place_of_what_compress_exports(name: str) -> None:
    """`import compress.run.x` would make `compress.run` a package; one of _ROOMS can be called."""
    assert (REPO / "compress" / name).exists() == (name in compress._ROOMS)


@pytest.mark.parametrize("folder", ["kernels", "calibration", "exporters"])
def test_source_roots_are_no_packages(folder: str) -> None:
    """A package `kernels` would take the place of Hugging Face's, which transformers imports."""
    assert not (REPO / folder / "__init__.py").exists()


def outcome_of(script: str) -> object:
    """What a script prints as JSON, in a process that sees the source roots and the clone."""
    path = ":".join(str(REPO / name) for name in (".", "calibration", "exporters", "kernels"))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": path, "PATH": ""},
    )
    return json.loads(done.stdout)


def test_import_compress_is_light() -> None:
    script = (
        "import sys, json, compress; compress.__version__;"
        "print(json.dumps([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules]))"
    )
    assert outcome_of(script) == []


def test_hugging_face_kernels_is_not_shadowed(tmp_path: Path) -> None:
    """With the clone at the front of sys.path, a real package `kernels` behind it still wins."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("owner = 'them'\n")
    script = (
        f"import sys, json; sys.path.append({str(tmp_path)!r}); import compress_kernels, kernels;"
        "print(json.dumps(kernels.owner))"
    )
    assert outcome_of(script) == "them"


def product() -> dict[str, ast.Module]:
    """Module -> its syntax, of all that is installed."""
    found = {}
    for folder in (".", "calibration", "exporters", "kernels"):
        for package in PACKAGES:
            for path in sorted((REPO / folder / package).rglob("*.py")):
                parts = path.relative_to(REPO / folder).with_suffix("").parts
                name = ".".join(parts).removesuffix(".__init__")
                found[name] = syntax(path)
    return found


def arrows() -> Iterator[tuple[str, str]]:
    """Who imports whom, inside of functions too."""
    modules = product()
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from ((name, alias.name) for alias in node.names if alias.name in modules)
            elif isinstance(node, ast.ImportFrom) and node.module in modules:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield name, inner if inner in modules else node.module


def test_every_operation_has_a_reference_and_compiled_code() -> None:
    def names(folder: str) -> set[str]:
        files = (REPO / "kernels" / "compress_kernels" / folder).glob("[a-z]*.py")
        return {path.stem for path in files}

    operations = names("ops") - {"checks", "tiled_attention"}
    assert names("reference") == operations
    no_ops = {"build", "bundle", "levels", "library", "program", "quota", "wheel"}
    assert names("cpu") - no_ops == operations
    assert names("triton") - {"grid"} <= operations


def test_folders_are_small() -> None:
    roots = (*ROOTS, REPO / "tests")
    files = Counter(
        path.parent for root in roots for path in root.rglob("*") if path.suffix in CODE
    )
    assert {str(f.relative_to(REPO)): n for f, n in files.items() if n > FOLDER_FILES} == {}


def test_a_class_name_stands_for_one_thing() -> None:
    places = defaultdict(list)
    for module, tree in {**product(), "setup": syntax(REPO / "setup.py")}.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_room_imports_in_a_circle() -> None:
    """Neither rooms of one room nor its files; a room's `__init__` is its door, not in it."""
    below: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for importer, imported in arrows():
        one, other = importer.split("."), imported.split(".")
        depth = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
        if depth:
            below[".".join(one[:depth])][one[depth]].add(other[depth])
    for room, graph in below.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"a circle in {room}: {' -> '.join(error.args[1])}")


def test_import_contracts_name_every_package() -> None:
    """A new folder of compress/ must be given its place among the layers."""
    tools = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]
    layers, circles, leaf = tools["importlinter"]["contracts"]
    layered = {name for layer in layers["layers"] for name in layer.split(" | ")}
    named = {*layered, *leaf["source_modules"]}
    folders = {p.parent.name for p in (REPO / "compress").glob("*/__init__.py")}
    assert {f"compress.{name}" for name in folders} <= named
    packages = {name for name in layered if name.startswith("compress_")}
    rooms = {f"compress.{name}" for name in folders} | {"compress.verbs"} | packages
    assert set(leaf["forbidden_modules"]) == rooms - {"compress.report"}
    assert set(circles["ancestors"]) == {"compress", *packages}


def section(page: Path, heading: str) -> str:
    match = re.search(rf"^(#+) {re.escape(heading)}$", page.read_text(), re.MULTILINE)
    assert match is not None, f"{page.name} has no heading {heading!r}"
    rest = page.read_text()[match.end() :]
    return re.split(rf"^#{{1,{len(match[1])}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def first_column(text: str) -> list[str]:
    return re.findall(r"^\| `([^`|]+)` \|", text, re.MULTILINE)


def test_documented_methods_are_the_methods() -> None:
    page = REPO / "docs" / "methods.md"
    assert re.findall(r"^## `(\w+)`", page.read_text(), re.MULTILINE) == list(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_documented_options_are_the_options(name: str) -> None:
    text = section(REPO / "docs" / "methods.md", f"`{name}`")
    options = {option.name: option.default for option in dataclasses.fields(METHODS[name].config)}
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`|]+)` \|", text, re.MULTILINE))
    assert rows == {name: str(default).lower() for name, default in options.items()}


def test_readme_lists_the_built_in_recipes() -> None:
    assert first_column(section(REPO / "README.md", "Built-in recipes")) == builtin_names()


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them: those that come again are counted."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?)[ #]*$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def test_anchors_are_those_that_github_makes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# `a_b` on C-D: it's\n```sh\n# no heading\n```\n## [E](x.md)\n## E\n")
    assert anchors(page) == {"a_b-on-c-d-its", "e", "e-1"}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: p.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths in code spans that begin with a folder of the repository."""
    tops = "compress|calibration|exporters|kernels|recipes|tests|benchmarks|docs|examples"
    for path in re.findall(rf"`((?:{tops})/[\w./-]*)`", page.read_text()):
        assert (REPO / path).exists(), path


def commands_in(page: Path, tool: str) -> Iterator[list[str]]:
    """Lines of code blocks that call a tool, as words; comments and prompts left out."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.removeprefix("$ ").partition(" #")[0].split()
            if words and words[0].rpartition("/")[2] == tool:
                yield words[1:]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: p.name)
def test_commands_that_are_shown_exist(page: Path) -> None:
    for words in commands_in(page, "compress-model"):
        if words[0].startswith("-"):
            continue
        assert words[0] in COMMANDS, words
        command = cli.get_command(Context(cli), words[0])
        assert command is not None
        options = {o for p in command.params if isinstance(p, Option) for o in p.opts}
        assert {w for w in words if w.startswith("--")} <= options | {"--help"}, words


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: p.name)
def test_make_targets_that_are_shown_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"`make ([\w-]+)", page.read_text()))
    for words in commands_in(page, "make"):
        shown |= {w for w in words if "=" not in w and not w.startswith("-")}
    assert shown <= targets
