"""The target `gguf`: what it plans, writes and proves. The package gguf is loaded when used."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from compress.formats.weights import Weights
from compress.quant.ggml_kinds import KINDS
from compress.report.units import counted
from compress_exporters import starting
from compress_exporters.exporter import (
    Exporter,
    Options,
    Progress,
    Proof,
    RoundedRows,
    Written,
    require,
)
from compress_exporters.gguf.in_file import InFile
from compress_exporters.gguf.loaded import (
    LoaderResult,
    has_accelerate,
    has_llamacpp,
    in_llamacpp,
    in_transformers,
    why_not_in_transformers,
)
from compress_exporters.gguf.plan import GgufPlan, make_plan
from compress_exporters.gguf.proof_size import proof_bytes
from compress_exporters.gguf.readback import read_back
from compress_exporters.gguf.write import FILE, write_file
from compress_exporters.reference import Reference, fits, text
from compress_exporters.sidefiles import copy_side_files

NAME, EXTRA = "gguf", "gguf"


@dataclass(frozen=True, slots=True, eq=False)
class PlannedGguf:
    """plan: every tensor with its kind, and all keys of the file. measured: where what columns
    multiply goes, where weights are left for llama-quantize to round by it."""

    plan: GgufPlan
    linked: int = 0
    measured: Path | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        return self.plan.notes

    @property
    def size(self) -> int:
        return self.plan.map.size

    def with_rows(self, rows: RoundedRows) -> Self:
        """What is rounded into blocks is what was rounded elsewhere."""
        return replace(self, plan=replace(self.plan, given=rows))

    def write(self, folder: Path, progress: Progress) -> Written:
        """The file, and beside it what our own reader opens it with: config.json and the
        tokenizer, of which llama.cpp needs nothing."""
        alone = self.write_alone(folder, progress)
        return replace(alone, beside=copy_side_files(self.plan.source, folder))

    def write_alone(self, folder: Path, progress: Progress) -> Written:
        """The file, into a folder that gets the others elsewhere."""
        rounded = write_file(self.plan, folder / FILE, progress)
        return Written((FILE,), (*self.notes, *rounded))

    def verify(self, folder: Path) -> Proof:
        return _compared(self.plan, folder / FILE)

    def start(self, folder: Path) -> tuple[str, ...]:
        chats = any(key == "tokenizer.chat_template" for key, _ in self.plan.fields)
        lines = starting.llama(folder / FILE, chats=chats)
        if self.measured is None:
            return lines
        again = any(KINDS[kind].block > 1 for kind in self.plan.kinds)
        return (*lines, starting.quantize(folder / FILE, self.measured, again=again))


def plan(source: Weights, options: Options) -> PlannedGguf:
    require(NAME, EXTRA, "gguf")
    # A text without a type is measured on, and rounds nothing.
    calibrated = options.text is not None and options.type is not None
    made = make_plan(source, options, calibrated=calibrated)
    if options.imatrix_out is None:
        return PlannedGguf(made)
    said = replace(made, notes=(*made.notes, _goes_to(made, options)))
    alone = None if calibrated else Path(options.imatrix_out).resolve()
    return PlannedGguf(said, measured=alone)


def _goes_to(plan: GgufPlan, options: Options) -> str:
    text, out = options.text, options.imatrix_out
    assert text is not None, "nothing is measured without a text"
    assert out is not None, "it is asked for"
    weights = counted(len(plan.multiplied), "weight")
    said = (
        f"importance of the columns of {weights}, measured on {Path(text).name}, goes to"
        f" {Path(out).name}, for llama-quantize --imatrix"
    )
    if options.type is not None:
        return f"{said}; what a block reads comes from those before it as they are rounded"
    return f"{said}; --embedding f16 leaves it all rounding" if plan.fresh else said


def _compared(plan: GgufPlan, path: Path) -> Proof:
    """Every number read back; then logits in transformers and in llama.cpp, each where it is there
    and reads the architecture."""
    source, detail = plan.source, read_back(plan, path)
    if not fits(proof_bytes(source.spec)):
        return Proof("form", None, (*detail, "too little memory is free to compare logits"))
    ids = _text(source, plan)
    reference, moved = _reference(plan, path, ids)
    detail += moved
    seen = []
    if (refused := why_not_in_transformers(plan)) is not None:
        detail += (refused,)
    elif not has_accelerate():
        detail += ("transformers was not asked; it reads GGUF files where accelerate is installed",)
    else:
        seen.append(in_transformers(plan, path, reference, ids))
    if not has_llamacpp():
        detail += ("llama.cpp was not asked; it is where xllamacpp is installed",)
    elif len(ids) < 2:
        detail += ("llama.cpp was not asked; it reads no prompt of a file for one position",)
    else:
        seen.append(in_llamacpp(plan, path, reference, ids))
    return _proof(detail + tuple(x.line for x in seen), seen)


def _reference(plan: GgufPlan, path: Path, ids: list[int]) -> tuple[Reference, tuple[str, ...]]:
    """Our decoder on what the file says; and a line on how far that is from the checkpoint, where
    dense numbers were rounded into blocks."""
    if not plan.fresh:
        return Reference.load(plan.source), ()
    was = Reference.load(plan.source).logits(ids).log_softmax(-1)
    reference = Reference.of(InFile.of(plan, path))
    becomes = reference.logits(ids).log_softmax(-1)
    divergence = float((was.exp() * (was - becomes)).sum(-1).mean())
    line = (
        f"rounding into blocks moves log-probabilities of {counted(len(ids), 'random token')} by"
        f" {float((was - becomes).abs().max()):.2g} at most, KL {divergence:.2g} nats a token"
    )
    return reference, (line,)


def _text(source: Weights, plan: GgufPlan) -> list[int]:
    """Tokens that the file's context holds."""
    context = next(value for key, value in plan.fields if key.endswith(".context_length"))
    assert isinstance(context, int)
    return text(source)[:context]


def _proof(detail: tuple[str, ...], seen: list[LoaderResult]) -> Proof:
    """The error is the first one's: transformers', whose own rounding is none, where it reads the
    file."""
    if not seen:
        return Proof("form", None, detail)
    tokens = all(x.tokens for x in seen)
    return Proof("tokens" if tokens else "logits", seen[0].error, detail)


GGUF = Exporter(
    name=NAME,
    summary="one file for llama.cpp, with codes as they are where its blocks hold them",
    plan=plan,
    dtypes=("fp32", "fp16", "bf16"),
    blocks=True,
)
