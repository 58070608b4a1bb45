"""`compress-model plan`."""

from typing import TYPE_CHECKING

import click

from compress.byte_sizes import EXPECTED, byte_size
from compress.cli import completion, options
from compress.cli.printing import show

if TYPE_CHECKING:
    from compress.verbs import Plan


def byte_size_option(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """A size such as 64GB in bytes."""
    found = None if value is None else byte_size(value)
    if value is not None and found is None:
        raise click.BadParameter(f"{value!r}: {EXPECTED}")
    return found


@click.command("plan")
@click.argument("recipe", shell_complete=completion.recipes)
@options.model
@options.settings
@options.compute
@click.option(
    "--memory",
    metavar="SIZE",
    callback=byte_size_option,
    help="Plan for a machine with so much memory (64GB, 32GiB); times stay those of this one.",
)
@click.option("--modules", is_flag=True, help="A line for every layer, with its bytes.")
@options.as_json
def command(
    recipe: str,
    model: str,
    overrides: tuple[str, ...],
    device: str,
    dtype: str | None,
    memory: int | None,
    modules: bool,
    as_json: bool,
) -> int:
    """Show what RECIPE would do to a checkpoint: sizes, memory, time, and who can load it.

    Exit code 1 when something would stop the run.
    """
    from compress import verbs

    how = verbs.RunOptions(device, dtype)
    plan = verbs.make_plan(recipe, model, overrides=overrides, options=how, memory=memory)
    return show_plan(plan, as_json=as_json, modules=modules)


def show_plan(plan: "Plan", *, as_json: bool, modules: bool = False) -> int:
    """Print a plan; returns the exit code."""
    from compress import verbs

    if as_json:
        options.print_json(plan.to_json())
    else:
        show(verbs.plan_table(plan, modules=modules))
    return 1 if plan.problems else 0
