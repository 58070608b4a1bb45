"""compress-model: make a decoder checkpoint smaller, and prove what it cost.

Nothing heavy is imported here: `import compress` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from compress.version import VERSION as __version__

__all__ = [
    "CacheOptions",
    "CompareOptions",
    "Request",
    "RunOptions",
    "Sampling",
    "__version__",
    "compare",
    "open_model",
    "run",
]

if TYPE_CHECKING:
    from compress.runtime.sequences.request import Request, Sampling
    from compress.verbs import CacheOptions, CompareOptions, RunOptions, compare, open_model, run

_PLACES = {
    "CacheOptions": "compress.verbs",
    "CompareOptions": "compress.verbs",
    "Request": "compress.runtime.sequences.request",
    "RunOptions": "compress.verbs",
    "Sampling": "compress.runtime.sequences.request",
    "compare": "compress.verbs",
    "open_model": "compress.verbs",
    "run": "compress.verbs",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'compress' has no attribute {name!r}")
