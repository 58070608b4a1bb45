"""`compress-model plan`."""

import click

from compress.cli import options


@click.command("plan")
@click.argument("recipe")
@options.model
@options.settings
@options.compute
@options.as_json
def command(
    recipe: str,
    model: str,
    overrides: tuple[str, ...],
    device: str,
    dtype: str | None,
    as_json: bool,
) -> int:
    """Show what RECIPE would do to a checkpoint: sizes, memory, time, and who can load it.

    Exit code 1 when something would stop the run.
    """
    return show_plan(recipe, model, overrides, device, dtype, as_json)


def show_plan(
    recipe: str,
    model: str,
    overrides: tuple[str, ...],
    device: str,
    dtype: str | None,
    as_json: bool,
) -> int:
    """Print the plan; `run --dry-run` is the same. Returns the exit code."""
    from compress import pipeline

    plan = pipeline.make_plan(recipe, model, overrides=overrides, device=device, dtype=dtype)
    if as_json:
        options.print_json(plan.to_json())
    else:
        click.echo(pipeline.plan_table(plan))
    return 1 if plan.problems else 0
