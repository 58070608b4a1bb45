"""Options that `roofline` and `bench` share."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from compress.cli import options

if TYPE_CHECKING:
    from compress.speed.setting import SpeedSetting, SpeedTexts

F = TypeVar("F", bound=Callable[..., Any])


def texts(command: F) -> F:
    """--batch, --prompt, --output, --threads, --device, --dtype, --kv-dtype, --out and --json."""
    for decorate in reversed(
        (
            click.option(
                "--batch",
                "batches",
                type=options.count(),
                multiple=True,
                help="Texts at once. May be repeated; 1, 8 and 64 when left out.",
            ),
            click.option("--prompt", type=options.count(), help="Tokens of a prompt (128)."),
            click.option("--output", type=options.count(), help="Tokens of an output (64)."),
            click.option("--threads", type=options.count(), help="Threads of the processor."),
            click.option(
                "-o", "--out", metavar="FOLDER", help="Write report.json and report.html there."
            ),
            options.device,
            options.arithmetic,
            options.kv_dtype,
            options.as_json,
        )
    ):
        command = decorate(command)
    return command


def texts_of(asked: dict[str, Any]) -> "SpeedTexts":
    """Takes batches, prompt and output out of a command's values."""
    from compress.speed.setting import SpeedTexts

    return SpeedTexts(asked.pop("batches"), asked.pop("prompt"), asked.pop("output"))


def place_of(asked: dict[str, Any]) -> "SpeedSetting":
    """Takes device, dtypes and threads out of a command's values."""
    from compress.speed.setting import SpeedSetting

    names = ("device", "dtype", "threads", "kv_dtype", "math")
    return SpeedSetting(**{name: asked.pop(name) for name in names})
