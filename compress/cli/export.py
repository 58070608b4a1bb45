"""`compress-model export`."""

from collections.abc import Mapping
from types import MappingProxyType

import click

from compress.cli import options
from compress.cli.progress import watched

# What each of FORMATS holds, said without the codecs, which import torch.
HOLDS: Mapping[str, str] = MappingProxyType(
    {
        "compressed-tensors": "every scheme but outlier columns; for transformers and vLLM",
        "gptq": "integers of 2, 3, 4 and 8 bits, inputs as they are",
        "gptq_v2": "the same, with any zero points",
        "awq": "integers of 4 bits in groups or rows, inputs as they are",
        "fp8": "8-bit floats in blocks, or with one scale a tensor",
        "modelopt": "FP8, NVFP4 weights, symmetric integers of 4 and 8 bits, caches",
        "bitsandbytes": "LLM.int8() only",
        "dense": "16- or 32-bit weights of anything, for any loader of the model",
    }
)


class FormatsInHelp(click.Command):
    """A command whose help ends with the formats."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Formats"):
            formatter.write_dl(list(HOLDS.items()))


@click.command("export", cls=FormatsInHelp)
@click.argument("checkpoint")
@click.option(
    "--to", required=True, metavar="FORMAT", help="The format to write, one of those below."
)
@click.option("-o", "--out", metavar="FOLDER", help="Where the result goes.")
@click.option("--round-scales", is_flag=True, help="Round scales that FORMAT cannot hold exactly.")
@click.option(
    "--shard-size", default="5GB", show_default=True, metavar="SIZE", help="Most bytes of one file."
)
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
    """Write CHECKPOINT (quantized, a folder or a hub id) in another format.

    Nothing is calibrated anew: codes and scales stay what they are.
    """
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
