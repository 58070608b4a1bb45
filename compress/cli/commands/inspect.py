"""`compress-model inspect`."""

import click

from compress.cli import options
from compress.cli.printing import show


@click.command("inspect")
@options.checkpoint
@click.option("--verify", is_flag=True, help="Also read every tensor, looking for NaN and Inf.")
@click.option("--modules", is_flag=True, help="A line for every layer, with its bytes.")
@options.as_json
def command(checkpoint: str, verify: bool, modules: bool, as_json: bool) -> int:
    """Show what CHECKPOINT (a folder or a hub id) holds.

    Exit code 1 when --verify finds damage, and when the decoder cannot be described.
    """
    from compress import verbs

    facts = verbs.inspect_checkpoint(checkpoint, verify)
    if as_json:
        options.print_json(facts)
    else:
        show(verbs.inspect_table(facts, modules=modules))
    return 1 if facts.get("damaged") or isinstance(facts.get("decoder"), str) else 0
