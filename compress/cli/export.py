"""`compress-model export`."""

import click

from compress.cli import options
from compress.cli.progress import watched


@click.command("export")
@click.argument("checkpoint")
@click.option(
    "--to",
    required=True,
    metavar="FORMAT",
    help="awq, bitsandbytes, compressed-tensors, dense, gptq ...; any other word lists them.",
)
@click.option("-o", "--out", metavar="FOLDER", help="Where the result goes.")
@click.option("--round-scales", is_flag=True, help="Round scales that FORMAT cannot hold exactly.")
@click.option("--shard-size", default="5GB", show_default=True, help="Most bytes of one file.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier result in FOLDER.")
@click.option("--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
@options.as_json
def command(
    checkpoint: str,
    to: str,
    out: str | None,
    round_scales: bool,
    shard_size: str,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write CHECKPOINT (quantized, a folder or a hub id) in another format; nothing is calibrated
    anew, and codes and scales stay what they are."""
    from compress import pipeline

    if out is None and not dry_run:
        raise click.UsageError("give --out FOLDER, or --dry-run")
    if dry_run:
        report = pipeline.dry_export(
            checkpoint,
            to,
            out,
            round_scales=round_scales,
            shard_size=shard_size,
            overwrite=overwrite,
        )
    else:
        assert out is not None
        with watched() as progress:
            report = pipeline.export(
                checkpoint,
                to,
                out,
                round_scales=round_scales,
                shard_size=shard_size,
                overwrite=overwrite,
                progress=progress,
            )
    if as_json:
        options.print_json(report.to_json())
    else:
        click.echo(pipeline.export_table(report))
