"""An export's dense weights, rounded by what they read of a text before the file is written; and
what that is, for other programs to round by."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from compress.artifacts.plan import ArtifactPlan
from compress.artifacts.rounding.measured import importance_of, measured_file
from compress.artifacts.rounding.prepare import (
    RoundingTokens,
    block_rounding,
    chain_of,
    working_bytes,
)
from compress.artifacts.rounding.walk import BlockRounding, RoundedTensor, round_along, units
from compress.blocks.skeleton import Skeleton
from compress.checkpoint import disk
from compress.checkpoint.shards.header import main_dtype
from compress.events import Event, Progress
from compress.formats.weights import Weights
from compress.machine.environment import compute_dtype
from compress.methods.k_quants import KQuantsConfig
from compress.report.units import counted
from compress.text.tokenizer import load_tokenizer
from compress_calibration.config import CalibrationConfig, SourceConfig
from compress_calibration.dataset import build
from compress_calibration.readers import source_files
from compress_exporters.exporter import PlannedExport
from compress_exporters.gguf.imatrix_write import Importance
from compress_exporters.gguf.plan import ToRound
from compress_exporters.gguf.target import PlannedGguf

ROUND, MEASURE = "round", "measure"
SAMPLES, LENGTH = 128, 512  # rows of tokens, as many as a recipe's calibration has
WORKING = "rounding"
IN_MEMORY = 256 << 20  # bytes of hidden states; more are kept in files


@dataclass(frozen=True, slots=True, eq=False)
class RoundedExport:
    """planned: the file, with the rows that go into it. told: a line each on how they came out.
    importance: what columns multiply, by name of the tensor in GGUF, where it was asked for, read
    when it is looked at. chunk: tokens of a row."""

    planned: PlannedGguf
    told: tuple[str, ...]
    importance: Mapping[str, Importance]
    chunk: int


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a text is for. rounds: weights are rounded by it. measures: it is kept what columns
    multiply, behind rounded blocks where weights are rounded."""

    rounds: bool = True
    measures: bool = False

    @classmethod
    def of(cls, plan: ArtifactPlan) -> "Purpose":
        return cls(plan.options.type is not None, plan.imatrix is not None)


def data_of(text: str, context: int) -> CalibrationConfig:
    """What `--text` is calibrated on. text: a file, or several by a pattern. context: of the model,
    0 where nobody knows."""
    length = min(LENGTH, context or LENGTH)
    return CalibrationConfig((SourceConfig("text", text),), SAMPLES, length)


def beside_bytes(plan: ArtifactPlan) -> int:
    """What lies beside the file while it is made."""
    return bytes_beside(plan.source, plan.planned, _data(plan), Purpose.of(plan))


def bytes_beside(
    source: Weights,
    planned: PlannedExport,
    data: CalibrationConfig,
    purpose: Purpose = Purpose(),
) -> int:
    """As `beside_bytes`, of any calibration."""
    work = _work(source, as_gguf(planned), Path(), purpose)
    return working_bytes(
        work, data.samples, data.length, compute_dtype(_stored(source), "cpu", None)
    )


@contextmanager
def rounded(
    source: Weights,
    planned: PlannedExport,
    tokens: RoundingTokens,
    folder: Path,
    progress: Progress,
    purpose: Purpose = Purpose(),
) -> Iterator[RoundedExport]:
    """What was planned, with rounded rows, which are there until the context ends.

    folder: that the artifact goes into. DataError for a text that holds too little.
    """
    place = folder / WORKING
    with disk.refusing(f"make {place}"):
        disk.mkdir(place)
    try:
        work = _work(source, as_gguf(planned), place, purpose)
        yield _rounded(work, as_gguf(planned), tokens, place, progress)
    finally:
        with suppress(OSError):
            disk.remove_tree(place)


def tokens_of_text(plan: ArtifactPlan) -> RoundingTokens:
    """Of the text that the export names."""
    source, data = plan.source, _data(plan)
    tokenizer = load_tokenizer(source.checkpoint.small)
    found = build(data, tokenizer, generate=None, vocab=source.spec.vocab, fewest=1)
    return scratch_tokens(found.ids, found.mask, data)


def files_of(plan: ArtifactPlan) -> list[str]:
    """Names of the files of the text, without their folders: what is made is the same wherever
    they lie."""
    return [path.name for source in _data(plan).sources for path in source_files(source)]


def scratch_tokens(ids: Tensor, mask: Tensor | None, data: CalibrationConfig) -> RoundingTokens:
    """Of an export, which is not resumed: nothing outlives it."""
    return RoundingTokens(ids, mask, data.spill_bytes, scratch=IN_MEMORY)


def _work(source: Weights, planned: PlannedGguf, place: Path, purpose: Purpose) -> BlockRounding:
    plan = planned.plan
    to_round = plan.to_round if purpose.rounds else ToRound({}, None)
    work = block_rounding(source, to_round, place, KQuantsConfig())
    return replace(work, measured=measured_file(plan, place)) if purpose.measures else work


def _rounded(
    work: BlockRounding,
    planned: PlannedGguf,
    tokens: RoundingTokens,
    place: Path,
    progress: Progress,
) -> RoundedExport:
    source, rounds = work.weights, bool(work.to_round.weights)
    dtype = compute_dtype(_stored(source), "cpu", None)
    skeleton = Skeleton(source.checkpoint.config, source.spec, dtype=dtype)
    chain = chain_of(source, skeleton, tokens, place)
    names, layers = units(source.spec), list[RoundedTensor]()
    for done, (unit, made) in enumerate(round_along(work, chain), 1):
        layers += made
        progress(Event(ROUND if rounds else MEASURE, unit, done, len(names), 0.0))
    found = work.measured
    return RoundedExport(
        planned.with_rows(work.blocks) if rounds else planned,
        told(layers) if rounds else (),
        {} if found is None else importance_of(planned.plan.multiplied, found),
        tokens.ids.shape[1],
    )


def told(layers: Sequence[RoundedTensor]) -> tuple[str, ...]:
    """How the tensors came out: which make up for what they lose, and why others do not."""
    made = [x for x in layers if x.damping is not None]
    whole = f"{len(made)} of {counted(len(layers), 'rounded tensor')}"
    lines = [f"in {whole} columns make up for what others lose"]
    reasons: dict[str, int] = {}
    for x in layers:
        if x.kept is not None:
            reasons[x.kept] = reasons.get(x.kept, 0) + 1
    return (*lines, *(f"{count} rounded without that: {why}" for why, count in reasons.items()))


def as_gguf(planned: PlannedExport) -> PlannedGguf:
    assert isinstance(planned, PlannedGguf), "no other target rounds"
    return planned


def _data(plan: ArtifactPlan) -> CalibrationConfig:
    assert plan.options.text is not None, "only what is rounded by a text comes here"
    return data_of(plan.options.text, plan.source.spec.context)


def _stored(source: Weights) -> str:
    """Dtype code that most of the source is stored in."""
    return main_dtype(source.checkpoint.tensors.values())
