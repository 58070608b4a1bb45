"""Options that several commands share, so that they read the same everywhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from compress.cli import completion
from compress.cli.printing import show

if TYPE_CHECKING:
    from compress.report.schema import Report

MOST = 2**31 - 1  # of tokens, texts, items
F = TypeVar("F", bound=Callable[..., Any])


def count(least: int = 1) -> click.IntRange:
    """A number of things."""
    kind = click.IntRange(min=least, max=MOST)
    kind.name = "integer"  # click's own word, "integer range", is no English for 1e3
    return kind


def as_json(command: F) -> F:
    return click.option(
        "--json", "as_json", is_flag=True, help="Print JSON on stdout; progress stays on stderr."
    )(command)


def settings(command: F) -> F:
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=completion.changes,
        help="Replace a value of the recipe, e.g. stages[0].group_size=64. May be repeated.",
    )(command)


def model(command: F) -> F:
    return click.option(
        "--model",
        required=True,
        metavar="FOLDER",
        shell_complete=completion.folders,
        help="Checkpoint to compress, or a hub id.",
    )(command)


def checkpoint(command: F) -> F:
    """The argument CHECKPOINT."""
    return click.argument("checkpoint", shell_complete=completion.folders)(command)


def device(command: F) -> F:
    return click.option(
        "--device",
        default="auto",
        show_default=True,
        metavar="[auto|cpu|cuda|cuda:N]",
        help="Where blocks run; auto: a GPU that gives the CPU's results, else the CPU.",
    )(command)


def push(command: F) -> F:
    return click.option(
        "--push",
        metavar="REPO",
        help="Upload the result to this repository of the Hugging Face hub, a private one where"
        " there is none.",
    )(command)


def track(command: F) -> F:
    return click.option(
        "--track",
        multiple=True,
        type=click.Choice(["mlflow", "wandb", "tensorboard"]),
        help="Give the report's numbers to a tracker, too. May be repeated.",
    )(command)


def cache(command: F) -> F:
    return click.option(
        "--cache/--no-cache",
        default=True,
        help="Text that the model writes, and the evaluation of the source, are kept in the user's"
        " cache folder (doctor shows it) and taken from there; not with --no-cache.",
    )(command)


def compute(command: F) -> F:
    """--device and --dtype."""
    dtype = click.option(
        "--dtype",
        type=click.Choice(["bf16", "fp16", "fp32"]),
        help="Arithmetic of the blocks; chosen for the device when left out.",
    )
    return device(dtype(command))


def arithmetic(command: F) -> F:
    """--dtype of the engine."""
    return click.option(
        "--dtype",
        type=click.Choice(["fp32", "bf16", "fp16"]),
        default="fp32",
        show_default=True,
        help="Arithmetic of the engine.",
    )(command)


def kv_dtype(command: F) -> F:
    """--kv-dtype of the engine."""
    return click.option(
        "--kv-dtype",
        type=click.Choice(["fp32", "bf16", "fp16", "int8"]),
        help="How keys and values are stored; as --dtype when left out.",
    )(command)


def math(command: F) -> F:
    """--math of the engine."""
    return click.option(
        "--math",
        type=click.Choice(["exact", "int16", "int8"]),
        help="Inputs of products with codes, in fp32 on a CPU: as they are, or rounded to so many"
        " bits (int16 when left out).",
    )(command)


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(data, indent=1, ensure_ascii=False, default=str))


def print_report(report: "Report", page: Path | None, as_json: bool) -> None:
    """A report on stdout, as JSON or as a table that ends with the path of its page."""
    from compress.report.codec import to_json
    from compress.report.terminal.table import render_table

    if as_json:
        click.echo(to_json(report).rstrip("\n"))
    else:
        show(render_table(report, page).rstrip("\n"))
