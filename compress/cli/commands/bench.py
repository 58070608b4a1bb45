"""`compress-model bench`."""

from typing import Any

import click

from compress.cli import options, speed_options
from compress.cli.progress import watched


@click.command("bench")
@click.argument("checkpoint")
@speed_options.texts
def command(checkpoint: str, as_json: bool, **asked: Any) -> None:
    """Measure how fast the engine runs CHECKPOINT (a folder or a hub id), beside its prediction.

    Batches that nobody asked for and that would take over a minute are left out, and named.
    """
    from compress import verbs

    place, texts = speed_options.place_of(asked), speed_options.texts_of(asked)
    with watched() as progress:
        facts = verbs.measure_speed(checkpoint, texts, place=place, progress=progress, **asked)
    if as_json:
        options.print_json(facts)
    else:
        click.echo(verbs.speed_table(facts))
