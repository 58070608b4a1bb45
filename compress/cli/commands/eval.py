"""`compress-model eval`."""

from pathlib import Path
from typing import Literal

import click

from compress.cli import completion, options
from compress.cli.progress import watched

PAGE = "report.html"


@click.command("eval")
@options.checkpoint
@click.option(
    "--against",
    metavar="FOLDER",
    shell_complete=completion.folders,
    help="The source: adds its perplexity, KL, agreement.",
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="FILE",
    help="Text to measure on, or 'self'. May be repeated.",
)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="FILE",
    help="Questions with answers (.jsonl), or a mapping '{path: FILE, ...}'. May be repeated.",
)
@click.option("--window", type=options.count(2), help="Tokens the model sees at once.")
@click.option("--stride", type=options.count(), help="Tokens each further window scores.")
@click.option("--max-documents", type=options.count(), help="Use N documents of each text.")
@click.option(
    "--max-tokens",
    type=options.count(),
    help="Score the first N tokens of each text; a long one takes minutes.",
)
@click.option("--max-items", type=options.count(), help="Ask the first N items of each task.")
@click.option(
    "-o",
    "--out",
    metavar="FOLDER",
    shell_complete=completion.folders,
    help="Write report.json and report.html there.",
)
@options.device
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Arithmetic of the models; the head is always fp32 on texts.",
)
@click.option(
    "--math",
    type=click.Choice(["int16", "int8"]),
    help="Also what it costs on texts that the engine rounds inputs of products with codes to so"
    " many bits: perplexity, KL to exact products, agreement.",
)
@options.cache
@options.track
@options.as_json
def command(
    checkpoint: str,
    against: str | None,
    texts: tuple[str, ...],
    tasks: tuple[str, ...],
    window: int | None,
    stride: int | None,
    max_documents: int | None,
    max_tokens: int | None,
    max_items: int | None,
    out: str | None,
    device: str,
    dtype: Literal["fp32", "bf16"],
    math: Literal["int16", "int8"] | None,
    cache: bool,
    track: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure CHECKPOINT on texts and tasks, and how far it is from its source."""
    if not texts and not tasks:
        raise click.UsageError("give --text or --task, or both")
    from compress import verbs

    asked = verbs.EvaluationOptions(
        texts=texts,
        tasks=tasks,
        window=window,
        stride=stride,
        max_documents=max_documents,
        max_tokens=max_tokens,
        max_items=max_items,
        dtype=dtype,
        math=math,
        cache=cache,
        device=device,
        track=track,
    )
    with watched() as progress:
        report = verbs.evaluate_checkpoint(
            checkpoint, asked, against=against, out=out, progress=progress
        )
    options.print_report(report, Path(out) / PAGE if out else None, as_json)
