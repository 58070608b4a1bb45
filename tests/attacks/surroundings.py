"""Environments, limits, streams, packages: what a command finds around it."""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType

from attacks.case import Case

# Read while a command runs, so that a fork can have them.
VARIABLES: Mapping[str, tuple[str | None, ...]] = MappingProxyType(
    {
        "HOME": (None, "", "/nowhere", "/dev/null", "/proc", "x" * 300, "\udcff", "relative"),
        "XDG_CACHE_HOME": ("", "/nowhere", "/dev/null", "/proc", "x" * 300, "\udcff", "words.txt"),
        "TMPDIR": ("", "/nowhere", "/dev/null", "/proc", "x" * 300, "words.txt"),
        "COLUMNS": ("", "0", "-5", "1", "3", "nan", "9" * 30, "100000"),
        "LINES": ("", "0", "-5", "nan"),
        "NO_COLOR": ("1",),
        "TERM": (None, "", "dumb", "x"),
        "PATH": (None, "", "/nowhere", "\udcff"),
        "CXX": ("", "/bin/false", "/nowhere", "\udcff"),
        "CUDA_VISIBLE_DEVICES": ("", "-1", "99", "x", "0,0"),
        "COMPRESS_MODEL_NO_NATIVE": ("1", "0", "x"),
        "COMPRESS_MODEL_ISA": ("", " ", "x", "AVX2", "avx2,avx512", "\udcff", "x" * 300),
        "HF_HUB_OFFLINE": ("1", "x", "", "0"),
        "PYTHONHASHSEED": ("random", "0"),
    }
)
# Read when Python or a library starts.
EARLY: Mapping[str, tuple[str | None, ...]] = MappingProxyType(
    {
        "LANG": (None, "", "C", "POSIX", "xx_YY", "tr_TR.UTF-8", "de_DE.ISO-8859-1"),
        "LC_ALL": ("", "C", "POSIX", "xx", "ja_JP.SJIS"),
        "PYTHONUTF8": ("0",),
        "PYTHONIOENCODING": ("ascii", "latin-1", "utf-16", "utf-8:strict"),
        "PYTHONUNBUFFERED": ("1",),
        "PYTHONOPTIMIZE": ("1", "2"),
        "PYTHONDONTWRITEBYTECODE": ("1",),
        "PYTHONWARNINGS": ("always",),
        "OMP_NUM_THREADS": ("", "0", "-1", "x", "1.5", "100000", "9" * 30, "4,3"),
        "MKL_NUM_THREADS": ("", "0", "-1", "x", "9" * 30),
        "OMP_WAIT_POLICY": ("", "x", "active"),
        "KMP_AFFINITY": ("x",),
        "MALLOC_ARENA_MAX": ("1", "x"),
        "HF_HOME": ("", "/nowhere", "/dev/null", "\udcff", "words.txt"),
        "HF_HUB_CACHE": ("/nowhere", "/dev/null"),
        "TRANSFORMERS_OFFLINE": ("1", "x"),
        "TRANSFORMERS_VERBOSITY": ("debug", "x"),
        "HF_HUB_VERBOSITY": ("debug", "x"),
        "TOKENIZERS_PARALLELISM": ("true", "x"),
        "RAYON_NUM_THREADS": ("0", "x", "1"),
        "TORCH_LOGS": ("x",),
        "USE_TORCH": ("0", "x"),
        "TORCHDYNAMO_DISABLE": ("1",),
        "CUDA_VISIBLE_DEVICES": ("x", "99"),
        "HOME": (None, "", "/nowhere", "/dev/null", "\udcff"),
        "TMPDIR": ("/nowhere", "/dev/null"),
        "PATH": (None, "", "/nowhere"),
    }
)
LOCALES = tuple(name for name in EARLY if name.startswith(("LANG", "LC_", "PYTHON")))
_MIB = 1 << 20


def environment(rng: Random, case: Case, fresh: bool) -> None:
    """One to three variables that are odd."""
    table = EARLY if fresh else VARIABLES
    for name in rng.sample(list(table), rng.choice([1, 1, 2, 3])):
        case.environ[name] = rng.choice(table[name])
    case.fresh = fresh


def limit(rng: Random, case: Case, fresh: bool) -> None:
    """Few file handles, little memory, short files, no further process, a small stack."""
    kind = rng.choice(["NOFILE", "NOFILE", "AS", "AS", "FSIZE", "FSIZE", "NPROC", "STACK"])
    megabytes = [30, 60, 120, 400, 1500] if fresh else [0, 1, 2, 5, 10, 20, 40, 80, 160, 320]
    small: Mapping[str, list[int]] = {
        "NOFILE": list(range(12, 65)),
        "AS": [n * _MIB for n in megabytes],
        "FSIZE": [0, 1, 100, 1000, 4096, 10_000, 50_000, 100_000, 200_000],
        "NPROC": [0, 1],
        "STACK": [_MIB, 2 * _MIB],  # less is too little for Python's own start
    }
    case.limits[kind] = rng.choice(small[kind])
    if kind == "NPROC":
        case.user = "other"
    case.fresh = fresh


def streams(rng: Random, case: Case, fresh: bool) -> None:
    """Standard input and output that are closed, full, endless or nobody's."""
    name = rng.choice(["stdin", "stdout", "stdout", "stderr"])
    kinds = ["closed", "wrong", "text:\udcff\udcfe", "text:", "text:a\nb\n\nc", "text:\0"]
    kinds = kinds if name == "stdin" else ["closed", "full", "pipe", "full", "wrong"]
    setattr(case, name, rng.choice(kinds))
    if rng.random() < 0.2:
        case.stderr = "closed"
    case.fresh = fresh


# What a module does when it is imported, for one that is broken.
_BROKEN = (
    "raise ImportError('libfoo.so.1: cannot open shared object file')",
    "raise OSError('libfoo.so.1: cannot open shared object file')",
    "raise RuntimeError('this build\\nis broken')",
    "raise ModuleNotFoundError(\"No module named 'foo'\", name='foo')",
    "raise AttributeError('partially initialized module')",
    "import sys; del sys.modules[__name__]",
    "",
    "__version__ = '0.0.1'",
    "__version__ = None",
    "this is no Python",
)
_MISSING = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Finder())
"""
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "jinja2", "yaml", "click")
WANTED = ("onnx", "onnx_ir", "onnxruntime", "gguf", "datasets", "pyarrow", "huggingface_hub")


def packages(rng: Random, case: Case) -> None:
    """One or two packages that are not there, or that break when imported."""
    names = rng.sample([*NEEDED[:-1], *NEEDED[:4], *WANTED], rng.choice([1, 1, 2]))
    folder = case.folder.parent / "packages"
    folder.mkdir()
    if rng.random() < 0.5:
        (folder / "sitecustomize.py").write_text(_MISSING.format(names=names))
    else:
        for name in names:
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(rng.choice(_BROKEN))
    case.path, case.fresh = str(folder), True
    case.names = [*names, "foo"]


def closed_places(rng: Random, case: Case) -> None:
    """A plain user before folders or files that may not be written, or read."""
    case.user = "plain"
    found = [case.folder, *(case.folder / path for path in case.roles)]
    chosen: Path = rng.choice([path for path in found if path.exists()])
    if chosen.is_dir():
        chosen.chmod(rng.choice([0o500, 0o500, 0o300, 0o100, 0]))
    else:
        chosen.chmod(rng.choice([0, 0o200]))
