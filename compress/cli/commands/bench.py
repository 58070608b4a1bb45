"""`compress-model bench`."""

from typing import Any

import click

from compress.cli import options, speed_options
from compress.cli.printing import show
from compress.cli.progress import watched

EVERY = "all"


@click.command("bench")
@options.checkpoint
@click.option(
    "--math",
    type=click.Choice(["exact", "int16", "int8", EVERY]),
    help="Inputs of products with codes, in fp32 on a CPU: as they are, or rounded to so many bits"
    " (int16 when left out); 'all' measures every one that CHECKPOINT takes.",
)
@speed_options.texts
def command(checkpoint: str, as_json: bool, math: str | None, **asked: Any) -> None:
    """Measure how fast the engine runs CHECKPOINT (a folder or a hub id), beside its prediction.

    Batches that nobody asked for and that would take over a minute are left out, and named.
    """
    from compress import verbs

    asked["math"] = None if math == EVERY else math
    place, texts = speed_options.place_of(asked), speed_options.texts_of(asked)
    with watched() as progress:
        facts = verbs.measure_speed(
            checkpoint, texts, place=place, every_math=math == EVERY, progress=progress, **asked
        )
    if as_json:
        options.print_json(facts)
    else:
        show(verbs.speed_table(facts))
