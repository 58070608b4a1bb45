"""`compress-model run`."""

import shlex
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from compress.cli import completion, options
from compress.cli.commands.plan import show_plan
from compress.cli.progress import watched
from compress.errors import OutputError

PAGE = Path("report", "report.html")
INTERRUPTED, TERMINATED = 130, 143  # as a shell counts SIGINT and SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM, as of a scheduler that wants its machine back: it stops a run as Ctrl-C does."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` meanwhile, in the main thread, which alone hears signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command("run")
@click.argument("recipe", shell_complete=completion.recipes)
@options.model
@click.option(
    "-o",
    "--out",
    required=True,
    metavar="FOLDER",
    shell_complete=completion.folders,
    help="Where the result goes.",
)
@options.settings
@options.compute
@options.cache
@click.option("--resume", is_flag=True, help="Go on with a run that was stopped.")
@click.option("--overwrite", is_flag=True, help="Replace the result of an earlier run in FOLDER.")
@click.option("--dry-run", is_flag=True, help="Print the plan, with all that would stop the run.")
@options.push
@options.track
@options.as_json
def command(
    recipe: str,
    model: str,
    out: str,
    overrides: tuple[str, ...],
    device: str,
    dtype: str | None,
    cache: bool,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    push: str | None,
    track: tuple[str, ...],
    as_json: bool,
) -> int:
    """Compress a checkpoint as RECIPE says (a file, or a name from `compress-model recipes`)."""
    from compress import verbs

    how = verbs.RunOptions(device, dtype, resume, overwrite, cache, push, track)
    if dry_run:
        plan = verbs.make_plan(recipe, model, overrides=overrides, options=how, out=out)
        return show_plan(plan, as_json=as_json)
    try:
        with terminable(), watched() as progress:
            report = verbs.run(
                recipe, model, out, overrides=overrides, options=how, progress=progress
            )
    except KeyboardInterrupt as stopped:
        click.echo(_how_to_resume(click.get_current_context().params), err=True)
        return TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
    page = Path(out) / PAGE
    options.print_report(report, page if page.is_file() else None, as_json)
    return 0


def _how_to_resume(given: Mapping[str, Any]) -> str:
    """What to type after Ctrl-C or SIGTERM; `given` are the parameters of the stopped command."""
    from compress.checkpoint import require_idle

    out = given["out"].rstrip("/\\")
    partial, publishing, replaced = (
        Path(f"{out}.{state}") for state in ("partial", "publishing", "replaced")
    )
    try:
        require_idle(partial, publishing, Path(out))
    except OutputError as error:
        return f"stopped before anything was written; {error}"
    if publishing.is_dir():
        state = f"stopped while publishing; the whole result lies in {publishing}"
    elif partial.is_dir():
        state = f"stopped; what is finished lies in {partial}"
    elif replaced.is_dir():
        state = f"stopped; the result is in {out}, and what it replaced still in {replaced}"
    else:
        return "stopped before anything was written"
    words = ["run", given["recipe"], "--model", given["model"], "--out", given["out"]]
    words += [word for override in given["overrides"] for word in ("--set", override)]
    words += ["--device", given["device"]] if given["device"] != "auto" else []
    words += ["--dtype", given["dtype"]] if given["dtype"] else []
    words += [] if given["cache"] else ["--no-cache"]
    words += ["--push", given["push"]] if given["push"] else []
    words += [word for name in given["track"] for word in ("--track", name)]
    words += ["--overwrite"] if given["overwrite"] else []
    line = shlex.join(["compress-model", *words, "--resume"])
    return f"{state}. To go on:\n  {line}"
