"""The fields of report.json, version 1.

Sizes are bytes, times are seconds, ratios are plain fractions. `None` means "not measured" or "does
not apply"; a page says so and never prints a made-up zero.
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from compress.report.records.loads import StockLoad
from compress.report.records.quality import Quality
from compress.report.records.sizes import SizeCandidate

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    """The recipe that was carried out: `text` is its YAML, before the `overrides` ("key=value")."""

    name: str
    text: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint that went in.

    architecture: for people, "llama, 6 blocks, hidden 256, ffn 768". kv_bytes_per_token,
        context, kv_bytes_of_context: as of the result.
    """

    path: str
    sha256: str
    params: int
    bytes: int
    dtype: str = ""
    architecture: str = ""
    kv_bytes_per_token: int | None = None
    context: int | None = None
    kv_bytes_of_context: int | None = None


@dataclass(frozen=True, slots=True)
class SizePart:
    """A share of the weight files: "quantized weights", "scales", "dense linears" (of the blocks),
    "embeddings", "norms and other", "file headers". The parts add up to `Source.bytes` and
    `Result.bytes`.
    """

    name: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class Result:
    """The checkpoint that came out.

    bits_per_weight: of the compressed linears, scales and zeros included, norms and embeddings not.
    kv_bytes_per_token: what a runtime's KV cache takes for one token, in the dtype of the
        embedding or, where the checkpoint has scales for a cache of 8 bits, one byte a number,
        before any window has left the token behind.
    context, kv_bytes_of_context: tokens that the model reads, and what a text of so many takes,
        where a layer with a window keeps no more than it sees.
    format: storage format, "compressed-tensors pack-quantized".
    architecture: as of the source; empty where it is not told.
    dtype: of what is not compressed, as of the source; empty where it is not told.
    """

    path: str
    params: int
    bytes: int
    bits_per_weight: float
    kv_bytes_per_token: int | None
    format: str = ""
    architecture: str = ""
    dtype: str = ""
    sizes: tuple[SizePart, ...] = ()
    context: int | None = None
    kv_bytes_of_context: int | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear of one decoder block.

    error: tr(D H D^T) / tr(W H W^T) with D the change of the weight W and H the Hessian of the
        layer's inputs (the identity when `tokens` is None or 0: no data was used, or none came).
    tokens: calibration tokens that reached the layer.
    damping: the fraction of H's mean diagonal that was added to it.
    skipped_reason: why the layer stays uncompressed; None when it was compressed.
    kept_reason: why a simpler method than the recipe's was kept, "rtn has the lower error".
    dead_columns: input columns that calibration never drove; None where the method does not look.
    outlier_columns: input columns that calibration found to be outliers, whose weights stay in 16
        bit; None where none were looked for, as when the runtime finds them.
    plain_error: error of rounding to nearest under the same scheme, scales chosen with the same
        data, judged alike; None where the method does not compare with it.
    folds: what scaled the layer's input channels, or why a stage that should left them alone.
    passes: times that the calibration set went through the layer's block, for whatever stage; None
        without calibration.
    block, role, expert: place in the decoder, for the chart.
    """

    name: str
    scheme: str
    method: str
    bits_per_weight: float
    bytes_before: int
    bytes_after: int
    error: float | None = None
    tokens: int | None = None
    damping: float | None = None
    skipped_reason: str | None = None
    kept_reason: str | None = None
    block: int | None = None
    role: str = ""
    expert: int | None = None
    dead_columns: int | None = None
    folds: tuple[str, ...] = ()
    passes: int | None = None
    outlier_columns: int | None = None
    plain_error: float | None = None


@dataclass(frozen=True, slots=True)
class LinearRepair:
    """A linear that a stage cut or refitted.

    kept, of: input columns that stay, and that there were; of a router experts, and heads of keys
        or values that are shared. penalty: of the fit that was chosen; None where the source's
        columns stay as they are.
    before, after: share of the energy of what it should give that it misses on held-out rows of the
        calibration, without and with the refit; None where nothing was refitted. Of a router
        `before` is what the mixture of the experts that stay misses; of shared keys and values what
        scores and outputs miss of their energy, over all rows.
    note: why not, or what was out of the ordinary.
    """

    linear: str
    kept: int
    of: int
    penalty: float | None = None
    before: float | None = None
    after: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Course:
    """A training, measured from its start to its end.

    name: what was trained, "model" or "block 3". start, end: loss on held-out rows, before and with
        the state that was kept. ended: why it went no further.
    steps, tokens, losses, held, rates: a number for each measurement: steps done, tokens trained
        on, mean loss since the measurement before (None at the start), loss on held-out rows, and
        rate of the last step.
    """

    name: str
    start: float
    end: float
    ended: str
    steps: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    losses: tuple[float | None, ...] = ()
    held: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A step of the run, in the order of the recipe; evaluation is a stage too.

    others: share of the machine's processor time that other programs took meanwhile, in [0, 1];
        None where the system does not say.
    repairs: of a stage that changes the structure, by what data shows. courses: of one that trains.
    candidates: of one that searches sizes, those that were measured.
    """

    name: str
    seconds: float
    peak_rss_bytes: int
    peak_gpu_bytes: int | None = None
    layers: tuple[Layer, ...] = ()
    others: float | None = None
    repairs: tuple[LinearRepair, ...] = ()
    courses: tuple[Course, ...] = ()
    candidates: tuple[SizeCandidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """Text that both models continue from the same prompt; source and result exclude the prompt."""

    prompt: str
    source: str
    result: str


@dataclass(frozen=True, slots=True)
class Export:
    """An artifact for another runtime.

    path: of its folder, from the result's. proof: "none", "form", "loads", "logits" or "tokens".
    files: their names in the folder. notes: what was converted, widened or left out. fused:
    operator of the target that does several steps at once -> how many there are. unfused: what
    stayed in single steps -> why. detail: what was compared for the proof, or why no more was.
    open_with: what starts its runtime, a block to copy each.
    """

    target: str
    path: str
    bytes: int
    proof: str
    max_logit_error: float | None = None
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fused: dict[str, int] = field(default_factory=dict)
    unfused: dict[str, str] = field(default_factory=dict)
    detail: tuple[str, ...] = ()
    open_with: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Planned:
    """A number that the plan gave before the work, and what was then measured."""

    planned: float
    measured: float

    @property
    def deviation(self) -> float | None:
        """(measured - planned) / planned; 0 when both are 0, None when only the plan is."""
        if self.planned == 0:
            return 0.0 if self.measured == 0 else None
        return (self.measured - self.planned) / self.planned


@dataclass(frozen=True, slots=True)
class Budget:
    """What a recipe with a target chose its schemes by.

    target: in words, "4.25 bits a weight". sensitivity: what the losses are, "kl" (nats a token) or
        "output_error" (share of the energy of blocks' outputs).
    loss: of all layers together as predicted from plain rounding, and from the layers' errors as
        they were written.
    """

    target: str
    sensitivity: str
    loss: Planned


@dataclass(frozen=True, slots=True)
class PlanVsActual:
    """bytes_range: least and most bytes that were planned before any work, where a measurement of
    the run chose sizes; bytes and peak_rss are then planned with these."""

    bytes: Planned
    seconds: Planned
    peak_rss: Planned
    bytes_range: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it ran. memory: bytes of the machine. isa: "avx2", "avx512_vnni" ...

    kernels: which ones ran, "compiled: ..." or "torch, slower: ...", by device.
    """

    cpu: str
    threads: int
    memory: int
    isa: str
    gpu: str | None = None
    kernels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """All of report.json. started, finished: ISO 8601 with a time zone.

    command: what wrote it, "run" or "eval".
    calibration: the data summary of the calibration set, None for data-free recipes.
    samples_reason: why there are no samples, None when there are some.
    copied_tensors, copied_files: what was carried over untouched; skipped_files: left behind.
    open_with: lines to copy that open the result, blocks with an empty line between two;
    open_reason: why there are none.
    budget: for a recipe with a target. loads: for one with stages that change the structure. notes:
    what these stages say of what they leave. two_models: whether an evaluation was of a result and
    its source; None where the paths say it, in a run's and in those of earlier versions.
    """

    tool: str
    versions: dict[str, str]
    recipe: RecipeInfo
    seed: int
    source: Source
    result: Result
    stages: tuple[StageRecord, ...]
    machine: Machine
    started: str
    finished: str
    command: str = "run"
    calibration: dict[str, Any] | None = None
    quality: Quality | None = None
    samples: tuple[Sample, ...] = ()
    samples_reason: str | None = None
    exports: tuple[Export, ...] = ()
    speed: dict[str, Any] = field(default_factory=dict)
    plan_vs_actual: PlanVsActual | None = None
    warnings: tuple[str, ...] = ()
    copied_tensors: tuple[str, ...] = ()
    copied_files: tuple[str, ...] = ()
    skipped_files: tuple[str, ...] = ()
    open_with: tuple[str, ...] = ()
    open_reason: str | None = None
    budget: Budget | None = None
    loads: StockLoad | None = None
    notes: tuple[str, ...] = ()
    two_models: bool | None = None
    schema: int = SCHEMA_VERSION

    def __repr__(self) -> str:
        return str(_show().report_line(self))

    def _repr_html_(self) -> str:
        return str(_show().report_html(self))

    @property
    def seconds(self) -> float:
        """Time of all stages, evaluation included."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def peak_rss_bytes(self) -> int:
        return max((stage.peak_rss_bytes for stage in self.stages), default=0)

    @property
    def peak_gpu_bytes(self) -> int | None:
        return max((s.peak_gpu_bytes for s in self.stages if s.peak_gpu_bytes), default=None)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(layer for stage in self.stages for layer in stage.layers)


def _show() -> Any:
    """What draws a report reads it; so it is found when it is asked for."""
    return import_module("compress.report.notebook.show")
