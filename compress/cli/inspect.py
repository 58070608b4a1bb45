"""`compress-model inspect`."""

import click

from compress.cli import options


@click.command("inspect")
@click.argument("checkpoint")
@click.option("--verify", is_flag=True, help="Also read every tensor, looking for NaN and Inf.")
@options.as_json
def command(checkpoint: str, verify: bool, as_json: bool) -> int:
    """Show what CHECKPOINT (a folder or a hub id) holds; exit code 1 if --verify finds damage."""
    from compress import pipeline

    facts = pipeline.inspect_checkpoint(checkpoint, verify)
    if as_json:
        options.print_json(facts)
    else:
        click.echo(pipeline.inspect_table(facts))
    return 1 if facts.get("damaged") else 0
