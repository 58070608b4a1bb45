"""compress-model: make a decoder checkpoint smaller, and prove what it cost.

Nothing heavy is imported here: `import compress` loads neither torch nor transformers.
"""

from typing import TYPE_CHECKING, Any

from compress.version import VERSION as __version__

__all__ = ["__version__", "run"]

if TYPE_CHECKING:
    from compress.pipeline import run


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "run":
        from compress.pipeline import run

        return run
    raise AttributeError(f"module 'compress' has no attribute {name!r}")
