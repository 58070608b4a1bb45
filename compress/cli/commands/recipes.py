"""`compress-model recipes`."""

import click

from compress.cli import completion, options
from compress.cli.printing import show


@click.command("recipes")
@click.argument("name", required=False, shell_complete=completion.recipes)
@options.as_json
def command(name: str | None, as_json: bool) -> None:
    """List the built-in recipes, or show the one called NAME."""
    from compress.recipe.lookup import builtin, builtin_names

    if name is not None:
        found = builtin(name)
        if as_json:
            options.print_json(
                {"name": found.name, "description": found.description, "text": found.text}
            )
        else:
            click.echo(found.text.rstrip("\n"))
        return
    listed = [builtin(known) for known in builtin_names()]
    if as_json:
        options.print_json([{"name": r.name, "description": r.description} for r in listed])
        return
    width = max(len(r.name) for r in listed)
    show("\n".join(f"{r.name:{width}}  {r.description}" for r in listed))
    show("\nShow one with `compress-model recipes NAME`; copy it to a file to change it.")
