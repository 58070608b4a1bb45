"""`compress-model export`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from compress.cli import completion, options
from compress.cli.printing import show
from compress.cli.process import give_back
from compress.cli.progress import watched
from compress.cli.written_for import HOLDS, TARGETS

if TYPE_CHECKING:
    from compress.verbs import ArtifactTarget, Conversion

ROUNDING = ("gguf",)  # of TARGETS, those that store scales
LEVELS = ("onnx-genai",)  # those whose products round inputs, or do not
BLOCKS = ("gguf",)  # those that have types of blocks for dense weights
IN_PLACE = ("onnx",)  # and those that can point to the checkpoint's own weights


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What is asked of an export into any format and for any runtime."""

    checkpoint: str
    to: str
    out: str | None
    overwrite: bool
    dry_run: bool
    as_json: bool
    push: str | None
    track: tuple[str, ...]

    @property
    def folder(self) -> Path | None:
        return None if self.out is None else Path(self.out)


class FormatsInHelp(click.Command):
    """A command whose help ends with the formats and the targets."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, rows in (("Formats", HOLDS), ("Other runtimes", TARGETS)):
            with formatter.section(title):
                formatter.write_dl(list(rows.items()))


@click.command("export", cls=FormatsInHelp)
@options.checkpoint
@click.option(
    "--to",
    required=True,
    metavar="NAME",
    shell_complete=completion.targets,
    help="What to write, one of those below.",
)
@click.option(
    "-o",
    "--out",
    metavar="FOLDER",
    shell_complete=completion.folders,
    help="Where the result goes.",
)
@click.option("--round-scales", is_flag=True, help="Round scales that NAME cannot hold.")
@click.option(
    "--shard-size", metavar="SIZE", help="Most bytes of one file, 5GB by default (formats)."
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    help="Of dense weights and arithmetic, fp32 by default; in gguf 16 bits (other runtimes).",
)
@click.option(
    "--embedding",
    type=click.Choice(["f16", "q8_0", "q6_k"]),
    help="How dense embedding and head are stored, q8_0 unless --dtype is given (gguf).",
)
@click.option(
    "--type",
    "mixture",
    metavar="TYPE",
    shell_complete=completion.types,
    help="Round dense weights to llama.cpp's TYPE, such as Q4_K_M (gguf).",
)
@click.option(
    "--imatrix",
    metavar="FILE",
    help="What errors of --type weigh, as llama-imatrix writes it (gguf).",
)
@click.option(
    "--text",
    metavar="FILE",
    help="With --type or --imatrix-out: round by what the layers read of a text, as GPTQ does, or"
    " measure that (gguf).",
)
@click.option(
    "--imatrix-out",
    metavar="FILE",
    help="Write the importance that --text shows for llama-quantize: FILE.gguf, or the older"
    " FILE.dat; without --type of the weights as they are (gguf).",
)
@click.option(
    "--max-context",
    type=options.count(),
    metavar="N",
    help="Positions to prepare for, the model's by default (other runtimes).",
)
@click.option(
    "--accuracy-level",
    type=click.Choice(["0", "4"]),
    help="4 rounds inputs of products to int8, 0 does not; 4 by default (onnx-genai).",
)
@click.option(
    "--in-place",
    is_flag=True,
    help="Add to CHECKPOINT's folder and point to its dense weights (onnx).",
)
@click.option("--no-verify", is_flag=True, help="Do not compare with the weights (other runtimes).")
@click.option("--overwrite", is_flag=True, help="Replace an earlier result.")
@click.option("--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
@options.push
@options.track
@options.as_json
def command(
    checkpoint: str,
    to: str,
    out: str | None,
    round_scales: bool,
    shard_size: str | None,
    dtype: Literal["fp32", "fp16", "bf16"] | None,
    embedding: Literal["f16", "q8_0", "q6_k"] | None,
    mixture: str | None,
    imatrix: str | None,
    text: str | None,
    imatrix_out: str | None,
    max_context: int | None,
    accuracy_level: Literal["0", "4"] | None,
    in_place: bool,
    no_verify: bool,
    overwrite: bool,
    dry_run: bool,
    push: str | None,
    track: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write CHECKPOINT (a folder or a hub id) in another format, or for another runtime.

    Nothing is calibrated anew: codes and scales stay what they are. Formats of checkpoints take a
    quantized one; for other runtimes it may be dense as well, and what is written is compared with
    the weights before it appears. With --to gguf --type dense weights are rounded.
    """
    from compress import verbs

    asked = ExportRequest(checkpoint, to, out, overwrite, dry_run, as_json, push, track)
    _require_place(asked, in_place)
    give_back()
    blocks = {"--embedding": embedding, "--type": mixture, "--imatrix": imatrix, "--text": text}
    blocks["--imatrix-out"] = imatrix_out
    if verbs.is_target(to):
        target = verbs.target_name(to)
        lost = round_scales and target not in ROUNDING
        _refuse(to, {"--shard-size": shard_size}, "formats")
        _refuse(to, {"--round-scales": lost}, f"formats and {', '.join(ROUNDING)}")
        level = None if target in LEVELS else accuracy_level
        _refuse(to, {"--accuracy-level": level}, ", ".join(LEVELS))
        if target not in BLOCKS:
            _refuse(to, blocks, ", ".join(BLOCKS))
        from compress_exporters.exporter import Options

        number: Literal[0, 4] = 0 if accuracy_level == "0" else 4
        rounding = (embedding, mixture, imatrix, text, imatrix_out)
        how = Options(dtype, max_context, round_scales, number, in_place, *rounding)
        _artifact(asked, verbs.ArtifactTarget(to, how), verify=not no_verify)
        return
    given = {"--dtype": dtype, "--max-context": max_context, "--accuracy-level": accuracy_level}
    _refuse(to, blocks, ", ".join(BLOCKS))
    _refuse(to, given | {"--no-verify": no_verify}, "other runtimes")
    _format(asked, verbs.Conversion(round_scales, shard_size or "5GB"))


def _require_place(asked: ExportRequest, in_place: bool) -> None:
    """A usage error unless it is known where the result goes."""
    from compress import verbs

    to, out = asked.to, asked.out
    if not in_place and out is None and not asked.dry_run:
        raise click.UsageError("give --out FOLDER, or --dry-run")
    _refuse(to, {"--in-place": in_place and verbs.target_name(to) not in IN_PLACE}, IN_PLACE[0])
    if in_place and asked.push is not None:
        raise click.UsageError("--push takes a folder of its own, and --in-place makes none")
    if in_place and out is not None:
        raise click.UsageError("--in-place goes into CHECKPOINT's own folder; leave --out out")


def _refuse(to: str, given: Mapping[str, object], those: str) -> None:
    """A usage error for an option that is for the other kind of result."""
    name = next((name for name, value in given.items() if value not in (None, False)), None)
    if name is not None:
        raise click.UsageError(f"{name} is for {those}, and --to is {to}; leave it out")


def _artifact(asked: ExportRequest, target: "ArtifactTarget", *, verify: bool) -> None:
    from compress import verbs

    overwrite = asked.overwrite
    if asked.dry_run:
        report = verbs.dry_artifact(asked.checkpoint, target, asked.out, overwrite=overwrite)
    else:
        with watched() as progress:
            share = verbs.ready(asked.push, asked.track, progress)
            report = verbs.export_artifact(
                asked.checkpoint,
                target,
                asked.out,
                verify=verify,
                overwrite=overwrite,
                progress=progress,
            )
            share.export(report.to_json(), asked.folder)
    if asked.as_json:
        options.print_json(report.to_json())
    else:
        show(verbs.artifact_table(report))


def _format(asked: ExportRequest, how: "Conversion") -> None:
    from compress import verbs

    checkpoint, to, out, overwrite = asked.checkpoint, asked.to, asked.out, asked.overwrite
    if asked.dry_run:
        report = verbs.dry_export(checkpoint, to, out, options=how, overwrite=overwrite)
    else:
        assert out is not None
        with watched() as progress:
            share = verbs.ready(asked.push, asked.track, progress)
            report = verbs.export(
                checkpoint, to, out, options=how, overwrite=overwrite, progress=progress
            )
            share.export(report.to_json(), asked.folder)
    if asked.as_json:
        options.print_json(report.to_json())
    else:
        show(verbs.export_table(report))
