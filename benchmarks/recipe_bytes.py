"""Whether two commits write the same bytes: every built-in recipe on tiny models of every family.

    python -m benchmarks.recipe_bytes OLD NEW        two checkouts, such as worktrees of two commits

Both run here, one after the other, with this interpreter's packages: bytes depend on processor and
versions. A recipe whose groups do not fit a tiny model is run with groups that do; what a checkout
refuses is compared by its words. Exits with 1 and the differences where there are any.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.processes import REPO

EMBEDDED = REPO / "examples" / "tale-6m"
FEW = ("calibration.samples=8", "calibration.length=64")
ROOTS = (".", "calibration", "exporters", "kernels")
SMALLER = 16  # columns of a group that every tiny model's widths are multiples of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        print(json.dumps(dict(_results(given.worker))))
        return
    if len(given.checkouts) != 2:
        parser.error("give two checkouts")
    with tempfile.TemporaryDirectory() as folder:
        _make_models(Path(folder))
        old, new = (_run(checkout.resolve(), Path(folder)) for checkout in given.checkouts)
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    for key in changed:
        print(f"{key}: {old.get(key)} -> {new.get(key)}")
    written = sum(len(value) == 64 for value in new.values())
    print(f"{written} results and {len(new) - written} refusals compared, {len(changed)} differ")
    sys.exit(1 if changed else 0)


def _make_models(folder: Path) -> None:
    sys.path.insert(0, str(REPO / "tests"))
    from helpers import tiny_models

    for family in tiny_models.FAMILIES:
        tiny_models.make(family, folder / family)
    (folder / "tale-6m").symlink_to(EMBEDDED)


def _run(checkout: Path, models: Path) -> dict[str, str]:
    """Model and recipe -> sha256 of the result's weights, or why it was refused."""
    path = os.pathsep.join(str(checkout / root) for root in ROOTS)
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--worker", str(models)],
            env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"},
            cwd=cache,
            stdout=subprocess.PIPE,
            check=True,
        )
    return dict(json.loads(done.stdout))


def _results(models: Path) -> Iterator[tuple[str, str]]:
    from compress.recipe import builtin_names

    for model in sorted(models.iterdir()):
        for recipe in builtin_names():
            yield f"{model.name} {recipe}", _result(recipe, model)
            print(f"{model.name} {recipe}", file=sys.stderr)


def _result(recipe: str, model: Path) -> str:
    from compress.errors import CompressError
    from compress.recipe import load

    calibrated, stages = load(recipe).calibration is not None, len(load(recipe).stages)
    settings = ["evaluation=null", *(FEW if calibrated else ())]
    smaller = [f"stages[{i}].group_size={SMALLER}" for i in range(stages)]
    said = ""
    for more in ([], smaller):
        try:
            return _weights(recipe, model, [*settings, *more])
        except CompressError as error:
            said = said or str(error)
    return said


def _weights(recipe: str, model: Path, settings: list[str]) -> str:
    """sha256 of the names and bytes of all weight files of a result."""
    import compress

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        compress.run(recipe, model, out, overrides=settings)
        digest = hashlib.sha256()
        for file in sorted(out.glob("*.safetensors")):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
