"""What a shell offers for an argument: click asks these while a line is typed."""

from importlib.resources import files

import click
from click.shell_completion import CompletionItem

from compress.cli.written_for import HOLDS, TARGETS

KEYS = ("seed", "calibration.", "evaluation.", "output.format", "stages[0].")


def recipes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Built-in recipes, or files. By their files' names: to read one takes torch, and a second."""
    found = (x.name for x in files("compress_recipes").iterdir())
    every = sorted(x.removesuffix(".yaml") for x in found if x.endswith(".yaml"))
    named = [CompletionItem(x) for x in every if x.startswith(incomplete)]
    return named or [CompletionItem(incomplete, type="file")]


def folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Checkpoints, and where results go."""
    return [CompletionItem(incomplete, type="dir")]


def targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Formats and other runtimes that a checkpoint is written for."""
    known = {**HOLDS, **TARGETS}
    return [CompletionItem(x, help=known[x]) for x in known if x.startswith(incomplete)]


def runtimes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Those that results are compared for."""
    from compress.comparison.routes import ROUTES

    def loads(export: str | None) -> str:
        return "loads the checkpoint" if export is None else f"loads what `--to {export}` writes"

    known = {name: loads(route.export) for name, route in ROUTES.items()}
    return [CompletionItem(x, help=known[x]) for x in known if x.startswith(incomplete)]


def types(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """llama.cpp's mixtures of types, in small letters where those are typed."""
    from compress.quant.ggml_mixtures import MIXTURES

    small = incomplete.islower()
    known = {name.lower() if small else name: mixture for name, mixture in MIXTURES.items()}
    return [
        CompletionItem(x, help=f"most weights take {mixture.bits:g} bits")
        for x, mixture in known.items()
        if x.startswith(incomplete)
    ]


def changes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The beginnings of keys, and the formats of `output.format`."""
    key, equals, value = incomplete.partition("=")
    if not equals:
        return [CompletionItem(x) for x in KEYS if x.startswith(key)]
    if key != "output.format":
        return []
    known = {**HOLDS, "gguf": TARGETS["gguf"]}
    return [CompletionItem(f"{key}={x}", help=known[x]) for x in known if x.startswith(value)]
