"""compress-model: make a decoder checkpoint smaller, and prove what it cost.

Nothing heavy is imported here: `import compress` loads neither torch nor transformers.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from compress.version import VERSION as __version__

__all__ = [
    "CacheOptions",
    "CompareOptions",
    "CompressError",
    "EvaluationOptions",
    "Event",
    "ExportOptions",
    "Plan",
    "Report",
    "Request",
    "RunOptions",
    "Sampling",
    "__version__",
    "compare",
    "evaluate",
    "export",
    "open_model",
    "plan",
    "run",
]

if TYPE_CHECKING:
    from compress.api.options import ExportOptions
    from compress.api.verbs import compare, evaluate, export, open_model, plan, run
    from compress.errors import CompressError
    from compress.events import Event
    from compress.plan.plan import Plan
    from compress.report.schema import Report
    from compress.runtime.sequences.request import Request, Sampling
    from compress.verbs import CacheOptions, CompareOptions, EvaluationOptions, RunOptions

_PLACES = {
    "CacheOptions": "compress.verbs",
    "CompareOptions": "compress.verbs",
    "CompressError": "compress.errors",
    "EvaluationOptions": "compress.verbs",
    "Event": "compress.events",
    "ExportOptions": "compress.api.options",
    "Plan": "compress.verbs",
    "Report": "compress.report.schema",
    "Request": "compress.runtime.sequences.request",
    "RunOptions": "compress.verbs",
    "Sampling": "compress.runtime.sequences.request",
    "compare": "compress.api.verbs",
    "evaluate": "compress.api.verbs",
    "export": "compress.api.verbs",
    "open_model": "compress.api.verbs",
    "plan": "compress.api.verbs",
    "run": "compress.api.verbs",
}
# Verbs that a room is named after as well: the room itself is called. An import of anything in the
# room puts it where the verb was, whoever imports it, so that the two must be one.
_ROOMS = frozenset({"plan"})


class _Room(ModuleType):
    """A package that is a verb, too: `compress.plan(...)` beside `compress.plan.plan`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _verb(self.__name__.rpartition(".")[2])(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(_verb(self.__name__.rpartition(".")[2]))


class _Package(ModuleType):
    """This package: it makes a room that it is given callable, where a verb has its name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ROOMS and type(value) is ModuleType:
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _verb(name: str) -> Any:
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"compress.{name}")
    if name in _PLACES:
        return _verb(name)
    raise AttributeError(f"module 'compress' has no attribute {name!r}")
