"""`compress-model roofline`."""

from typing import Any

import click

from compress.cli import completion, options, speed_options
from compress.cli.printing import show
from compress.cli.progress import watched


@click.command("roofline")
@options.checkpoint
@click.option(
    "--against",
    metavar="FOLDER",
    shell_complete=completion.folders,
    help="The source, predicted too.",
)
@options.math
@speed_options.texts
def command(checkpoint: str, as_json: bool, **asked: Any) -> None:
    """Predict how fast CHECKPOINT (a folder or a hub id) runs on this machine.

    Takes seconds: bandwidth, arithmetic and the engine's operations are measured one by one, and
    the weights are not loaded.
    """
    from compress import verbs

    place, texts = speed_options.place_of(asked), speed_options.texts_of(asked)
    with watched() as progress:
        facts = verbs.predict_speed(checkpoint, texts, place=place, progress=progress, **asked)
    if as_json:
        options.print_json(facts)
    else:
        show(verbs.speed_table(facts))
