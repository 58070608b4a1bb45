"""Source distribution and wheel hold everything, and the wheel runs in an empty environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from compress_kernels.cpu.build import packaged_path
from compress_kernels.cpu.levels import features, levels
from compress_kernels.cpu.wheel import platform_wheel

REPO = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
ROOTS = {name: REPO / folder for name, folder in SETUPTOOLS["package-dir"].items()}
SOURCES = ("compress", "calibration", "exporters", "kernels", "recipes", "docs")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")


@dataclass(frozen=True, slots=True)
class Built:
    """sdist and wheel as `python -m build` makes them (the wheel out of the sdist) of a tree; log:
    its output."""

    tree: Path
    sdist: Path
    wheel: Path
    log: str


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built from a copy, so that no earlier build/ or egg-info can lend a file."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        shutil.copytree(REPO / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*FILES, "CONTRIBUTING.md", "constraints.txt"):
        shutil.copy(REPO / name, tree)
    both = tmp_path_factory.mktemp("both")
    log = build(tree, "--outdir", str(both))
    (sdist,), (wheel,) = both.glob("*.tar.gz"), both.glob("*.whl")
    return Built(tree, sdist, wheel, log)


def build(tree: Path, *options: str) -> str:
    command = [sys.executable, "-m", "build", "--no-isolation", *options, str(tree)]
    # From elsewhere: a folder build/ in the current one would be imported in place of the tool.
    done = subprocess.run(command, capture_output=True, text=True, cwd=tree.parent, env=bare_env())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def bare_env(**more: str) -> dict[str, str]:
    """This environment without anything that leads Python to the clone."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | more


def files_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {n: archive.read(n) for n in archive.namelist() if ".dist-info/" not in n}


def shipped() -> dict[str, Path]:
    """Path in the wheel -> file of the clone, for everything in a package folder."""
    return {
        f"{package}/{path.relative_to(folder).as_posix()}": path
        for package, folder in ROOTS.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_package_list_is_complete() -> None:
    found = {Path(name).parent.as_posix() for name in shipped() if name.endswith(".py")}
    assert sorted(name.replace("/", ".") for name in found) == sorted(SETUPTOOLS["packages"])


def test_wheel_holds_every_file(built: Built) -> None:
    found, wanted = files_of(built.wheel), shipped()
    assert sorted(found) == sorted(wanted)  # of names: a difference of all bytes takes minutes
    assert [name for name, path in wanted.items() if found[name] != path.read_bytes()] == []


@pytest.mark.parametrize("ending", [".yaml", ".cpp", ".h", ".css", ".js", "py.typed"])
def test_wheel_holds_data(built: Built, ending: str) -> None:
    assert any(name.endswith(ending) for name in files_of(built.wheel))


@pytest.mark.long  # the sdist, of which the wheel is made, is held to have every source
def test_wheel_from_the_tree_is_the_same(built: Built, tmp_path: Path) -> None:
    log = build(built.tree, "--wheel", "--outdir", str(tmp_path))
    (direct,) = tmp_path.glob("*.whl")
    assert files_of(direct) == files_of(built.wheel)
    assert "Package would be ignored" not in log


def test_sdist_holds_sources_and_documents_but_no_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(REPO).as_posix() for path in shipped().values()}
    documents = {p.relative_to(REPO).as_posix() for p in (REPO / "docs").glob("*.md")}
    assert sources | documents | set(FILES) <= names
    assert not [name for name in names if name.startswith(("tests", "examples", "benchmarks"))]


def test_build_says_nothing_of_packages_left_out(built: Built) -> None:
    assert "Package would be ignored" not in built.log


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(built.wheel, tmp_path_factory)


def install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a new environment with the wheel; dependencies are those of this environment.

    They come through a .pth file: the .pth files among them, an editable install's for one, then
    have no effect. It is written after the install, or pip would find the package there.
    """
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    subprocess.run(
        [*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, env=bare_env()
    )
    (site,) = home.glob("lib/python*/site-packages")
    here = sysconfig.get_paths()
    (site / "dependencies.pth").write_text("\n".join({here["purelib"], here["platlib"]}) + "\n")
    return python.parent


def compress_model(installed: Path, cwd: Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(installed / "compress-model"), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=bare_env(HF_HUB_OFFLINE="1"),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installed_package_is_the_one_that_runs(installed: Path, tmp_path: Path) -> None:
    script = (
        "import compress, compress_calibration, compress_kernels, compress_recipes as r;"
        "import compress_exporters as e;"
        "print(*(m.__file__ for m in (compress, compress_calibration, e, compress_kernels, r)))"
    )
    done = subprocess.run(
        [str(installed / "python"), "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=bare_env(),
    )
    for file in done.stdout.split():
        assert Path(file).is_relative_to(installed.parent)


def test_installed_command_lists_and_shows_recipes(installed: Path, tmp_path: Path) -> None:
    assert "Usage: compress-model" in compress_model(installed, tmp_path, "--help")
    listed = compress_model(installed, tmp_path, "recipes")
    for recipe in (REPO / "recipes").glob("*.yaml"):
        assert f"{recipe.stem} " in listed
    shown = compress_model(installed, tmp_path, "recipes", "int4-rtn")
    assert shown == (REPO / "recipes" / "int4-rtn.yaml").read_text()


def test_installed_command_compresses_a_model(
    installed: Path, tmp_path: Path, demo_model: Path
) -> None:
    table = compress_model(
        installed,
        tmp_path,
        *("run", "int4-rtn", "--model", str(demo_model), "--out", "small"),
        *("--set", "evaluation=null"),
    )
    out = tmp_path / "small"
    assert "2.6× smaller" in table
    assert {"config.json", "model.safetensors", "recipe.yaml", "README.md", "report"} <= {
        path.name for path in out.iterdir()
    }
    assert (out / "report" / "report.html").stat().st_size > 10_000
    assert "int4 sym g128" in compress_model(installed, tmp_path, "inspect", "small")


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_a_wheel_of_this_platform_needs_no_compiler(
    built: Built, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = platform_wheel(built.wheel)
    assert "none-any" not in made.name
    library = f"compress_kernels/{packaged_path().parent.name}/{packaged_path().name}"
    assert set(files_of(made)) - set(files_of(built.wheel)) == {library}
    python = install(made, tmp_path_factory) / "python"
    script = (
        "import torch, compress_kernels as k; from compress_kernels.ops.linear import linear;"
        "x = torch.randn(3, 40); torch.testing.assert_close(linear(x, x), x @ x.T);"
        "print(k.status()['cpu'], k.paths()['instruction set'])"
    )
    for level in (level for level in levels() if level.needs <= features()):
        environment = bare_env(PATH="", CXX="", COMPRESS_MODEL_ISA=level.name)
        done = subprocess.run(
            [str(python), "-c", script], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert f"/{packaged_path().name} {level.name}" in done.stdout
    made.unlink()


def test_versions_agree() -> None:
    import compress

    text = (REPO / "CHANGELOG.md").read_text()
    assert f"## [{compress.__version__}]" in text
