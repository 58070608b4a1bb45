"""`compress-model compare`."""

import shlex
from pathlib import Path

import click

from compress.byte_sizes import EXPECTED, byte_size
from compress.cli import completion, options
from compress.cli.commands.run import INTERRUPTED, TERMINATED, Terminated, terminable
from compress.cli.progress import watched

PAGE = "compare.html"


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    found = None if value is None else byte_size(value)
    if value is not None and found is None:
        raise click.BadParameter(f"{value!r}: {EXPECTED}")
    return found


@click.command("compare")
@click.argument(
    "what",
    nargs=-1,
    required=True,
    metavar="MODEL | RESULT RESULT...",
    shell_complete=completion.folders,
)
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    metavar="RECIPE",
    shell_complete=completion.recipes,
    help="A file or a built-in recipe. May be repeated; left out: all built-in ones that load where"
    " --for says, and train nothing.",
)
@click.option(
    "--trainings",
    is_flag=True,
    help="Without --recipe: those that train the model, too, which takes minutes to hours each.",
)
@click.option(
    "-o",
    "--out",
    required=True,
    metavar="FOLDER",
    help="Where all results go.",
    shell_complete=completion.folders,
)
@click.option(
    "--for",
    "runtime",
    metavar="RUNTIME",
    shell_complete=completion.runtimes,
    help="Only what it loads: vllm, transformers, llama.cpp, onnxruntime and others. Sizes are then"
    " those of its own files.",
)
@click.option("--text", metavar="FILE", help="Text that all are measured on.")
@click.option("--max-tokens", type=options.count(), help="Score the first N tokens of the text.")
@click.option("--within", metavar="SIZE", callback=_size, help="The winner takes 5MB at most.")
@click.option("--kl", type=float, help="The winner loses so many nats a token at most.")
@click.option("--fastest", is_flag=True, help="Of those that fit the fastest in this engine wins.")
@options.compute
@options.cache
@click.option("--resume", is_flag=True, help="Go on with a comparison that was stopped.")
@options.as_json
def command(
    what: tuple[str, ...],
    recipes: tuple[str, ...],
    trainings: bool,
    out: str,
    runtime: str | None,
    text: str | None,
    max_tokens: int | None,
    within: int | None,
    kl: float | None,
    fastest: bool,
    device: str,
    dtype: str | None,
    cache: bool,
    resume: bool,
    as_json: bool,
) -> int:
    """Hold recipes on MODEL against each other, or finished RESULTs of one model.

    With --kl the smallest that fits wins, with --within the one of the lowest KL, with --fastest
    the fastest. Exit code 1 where nothing fits.
    """
    from compress import verbs
    from compress.report.comparison.table import render_comparison

    asked = verbs.CompareOptions(runtime, text, max_tokens, within, kl, fastest, resume, trainings)
    how = verbs.RunOptions(device, dtype, cache=cache)
    try:
        with terminable(), watched() as progress:
            found = verbs.compare(
                what, out, recipes=recipes, asked=asked, options=how, progress=progress
            )
    except KeyboardInterrupt as stopped:
        click.echo(_how_to_resume(out), err=True)
        return TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
    shown = found.to_json() if as_json else render_comparison(found, Path(out) / PAGE)
    click.echo(shown.rstrip("\n"))
    return 0 if found.wanted.is_any or found.winner is not None else 1


def _how_to_resume(out: str) -> str:
    """What to type after Ctrl-C or SIGTERM: the same line, with --resume."""
    if not Path(out).is_dir():
        return "stopped before anything was written"
    import sys

    words = [word for word in sys.argv[1:] if word != "--resume"]
    line = shlex.join(["compress-model", *words, "--resume"])
    return f"stopped; what is finished lies in {out}. To go on:\n  {line}"
