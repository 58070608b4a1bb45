"""How much memory each part of a run has at its worst moment, known before work starts.

Every part is the whole process: what is imported by then, and what that part holds on top of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch

from compress.arch.spec import DecoderSpec, LinearSpec
from compress.blocks.live import live_bytes
from compress.checkpoint.outline import Outline
from compress.checkpoint.shards.dtypes import TORCH_DTYPES
from compress.edits.work import EditSize
from compress.plan.lengths import evaluated_tokens
from compress.plan.row_counts import ROWS_AT_ONCE, rows_at_once
from compress.plan.whole.size import FileSize
from compress.quant.scheme import QuantScheme
from compress.recipe.evaluation_config import DEFAULT_WINDOW_CAP, EvaluationConfig
from compress_calibration.config import CalibrationConfig

MB = 1_000_000
# Resident after imports and probes, and what transformers, a model without weights and a tokenizer
# add: measured with torch 2.13 and transformers 5.23 on Linux x86-64 (VmHWM 300 and 505 to 600 MB).
TORCH_BYTES, TRANSFORMERS_BYTES = 300 * MB, 260 * MB
# The allocator keeps freed buffers below 32 MB, so small parts add up: models of 6M and 58M weights
# had 98 to 166 MB more than the largest of their parts.
KEPT_BYTES = 150 * MB
# While two models are compared: buffers of a chunk of logits, as many as fp32 ones, and heads, with
# the one that a product or a read has beside them.
LIVE_LOGITS, LIVE_HEADS = 7, 3
# Copies in fp32 of the weights that are solved together: a block of 7B widths took 3.47 GB in all.
SOLVED_COPIES = 5
# Ids of the calibration tokens: they stay while blocks are calibrated. While they are stored and
# read again there are three (VmHWM of 134 MB of ids in `calibration_tokens`: 403 MB).
ID_BYTES, ID_COPIES = 8, 3
# Held of each weight that an exporter works on, as in compress/convert/convert.py.
EXPORTED_BYTES = 10

QUANTIZING, WRITING = "quantizing", "text that the model writes to calibrate on"
MEASURING, EVALUATION = "measuring the schemes", "evaluation"
LESSONS, PROOF = "text that the model writes to train on", "proof of the GGUF file"


@dataclass(frozen=True, slots=True)
class RunSize:
    """What is to be done. `linears`: those to quantize, without a scheme where they go into blocks;
    `dtype`: of the calibrated passes; `head`: the output head, where it is solved by what it reads.
    measured: the calibration data that the schemes of a target are chosen by, where they are not
    chosen yet. exports: there are some. model: whose layers are rounded. edits: passes that change
    the model before. drawn: the calibration data that one of them, or an export, looks at;
    exported_by: that an export is rounded by. file: a GGUF file that is proved."""

    model: Outline
    spec: DecoderSpec
    linears: Sequence[tuple[LinearSpec, QuantScheme | None]]
    calibration: CalibrationConfig | None
    dtype: torch.dtype
    head: LinearSpec | None = None
    evaluation: EvaluationConfig | None = None
    measured: CalibrationConfig | None = None
    exports: bool = False
    edits: Sequence[EditSize] = ()
    drawn: CalibrationConfig | None = None
    exported_by: CalibrationConfig | None = None
    file: FileSize | None = None

    @property
    def given(self) -> Outline:
        """The model that the run is given, before all edits."""
        return self.edits[0].model if self.edits else self.model

    @property
    def given_spec(self) -> DecoderSpec:
        """Its spec."""
        return self.edits[0].model.spec if self.edits else self.spec


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """bytes: of the process at the worst moment of a part. required: the run stops without it; any
    other part is left out of the report, with the reason, where its bytes are not there."""

    part: str
    bytes: int
    required: bool = True


def memory_needs(run_size: RunSize, held: int = 0) -> tuple[MemoryNeed, ...]:
    """Of every part of the run, in its order. held: what the process has in memory already, where
    that is more than imports."""
    return tuple(_needs(run_size, held))


def _needs(run_size: RunSize, held: int) -> Iterator[MemoryNeed]:
    forwards = max(TORCH_BYTES + TRANSFORMERS_BYTES, held)
    if run_size.drawn is not None and own_share(run_size.drawn) > 0:
        given = replace(run_size, model=run_size.given, spec=run_size.given_spec)
        own = replace(given, calibration=run_size.drawn)
        yield MemoryNeed(WRITING, forwards + _with_ids(run_size.drawn, _written(own)))
    for edit in run_size.edits:
        if edit.written is not None and own_share(edit.written) > 0:
            given = replace(run_size, model=run_size.given, spec=run_size.given_spec)
            own = replace(given, calibration=edit.written)
            yield MemoryNeed(LESSONS, forwards + _with_ids(edit.written, _written(own)))
        looks = edit.work is not None
        base = forwards + min(KEPT_BYTES, edit.bytes) if looks else max(TORCH_BYTES, held)
        yield MemoryNeed(edit.name, base + edit.bytes)
    if run_size.measured is not None:
        wide = partial_run(run_size, run_size.measured, torch.float32)
        worst = max(_calibrated(wide), _written(wide))
        yield MemoryNeed(MEASURING, forwards + _with_ids(run_size.measured, worst))
    if run_size.calibration is not None:
        if own_share(run_size.calibration) > 0 and run_size.drawn is None:
            written = _with_ids(run_size.calibration, _written(run_size))
            yield MemoryNeed(WRITING, forwards + written)
        kept = min(KEPT_BYTES, _written(run_size))
        worst = max(_calibrated(run_size), _outside(run_size))
        yield MemoryNeed(QUANTIZING, forwards + kept + _with_ids(run_size.calibration, worst))
    else:
        # What evaluation will need is imported and tried before work starts.
        base = max(TORCH_BYTES, held) if run_size.evaluation is None else forwards
        if run_size.linears:
            yield MemoryNeed(QUANTIZING, base + _streamed(run_size))
    if run_size.file is not None:
        # Where it does not fit, the file is proved by its form alone.
        yield MemoryNeed(PROOF, forwards + run_size.file.proof_bytes, required=False)
    if run_size.evaluation is not None:
        # The source and the result are evaluated alike: the need is that of the larger one.
        given = replace(run_size, model=run_size.given, spec=run_size.given_spec)
        both = (_evaluated(each, run_size.evaluation, forwards) for each in (given, run_size))
        yield from (max(pair, key=lambda need: need.bytes) for pair in zip(*both, strict=True))
    if run_size.exports:
        largest = max(info.numel for info in run_size.model.tensors.values())
        worked = max(EXPORTED_BYTES * largest, _rounded_export(run_size))
        yield MemoryNeed("export", forwards + worked)


def _rounded_export(run_size: RunSize) -> int:
    """As a pass that calibrates all linears; 0 where no export rounds by data."""
    data, spec = run_size.exported_by, run_size.spec
    if data is None:
        return 0
    linears = [(linear, None) for linear in spec.all_linears()]
    size = RunSize(run_size.model, spec, linears, data, run_size.dtype)
    return _with_ids(data, max(_calibrated(size), _outside(size)))


def _with_ids(config: CalibrationConfig, work: int) -> int:
    """The ids of calibration tokens beside the work on them, or their copies before it."""
    ids = ID_BYTES * config.samples * config.length
    return max(ids + work, ID_COPIES * ids)


def partial_run(run_size: RunSize, calibration: CalibrationConfig, dtype: torch.dtype) -> RunSize:
    """The same layers in other passes."""
    return RunSize(
        run_size.model, run_size.spec, run_size.linears, calibration, dtype, run_size.head
    )


def _streamed(run_size: RunSize) -> int:
    worked = (_worked_at_once(linear, scheme) for linear, scheme in run_size.linears)
    largest = max(worked, default=0)
    stored = TORCH_DTYPES[run_size.model.main_dtype].itemsize
    copied = max(min(info.numel, ROWS_AT_ONCE) for info in run_size.model.tensors.values())
    # fp32 rows, their quotient, the dequantized values and the difference; source and codes whole.
    return max(largest * 4 * 4 + _held_whole(run_size) * (stored + 2), copied * stored)


def _worked_at_once(linear: LinearSpec, scheme: QuantScheme | None) -> int:
    """Weights in a run of rows; all of them where one number of the scheme is for all."""
    weights = prod(linear.shape)
    whole = scheme is not None and (scheme.is_fp4 or scheme.granularity == "tensor")
    return weights if whole else min(weights, ROWS_AT_ONCE)


def _held_whole(run_size: RunSize) -> int:
    """Weights of the largest linear, or of all that are merged and share a number."""
    together: dict[tuple[str, str, int | None], int] = {}
    for linear, scheme in run_size.linears:
        shared = linear.fused if scheme is not None and scheme.spans_merged else None
        key = (block_of(linear), shared, linear.expert) if shared else (linear.name, "", None)
        together[key] = together.get(key, 0) + prod(linear.shape)
    return max(together.values(), default=0)


def _calibrated(run_size: RunSize) -> int:
    """The worst of a batch in a block and of the largest solve."""
    assert run_size.calibration is not None
    config, spec = run_size.calibration, run_size.spec
    shape = (config.samples, config.length, spec.hidden)
    batch = rows_at_once(shape, run_size.dtype, config.spill_bytes) * config.length
    width = run_size.dtype.itemsize
    of_block = [x for x, _ in run_size.linears if block_of(x) == block_of(run_size.linears[0][0])]
    weights = sum(prod(x.shape) for x in of_block) * width
    inputs = {x.shared_input: x.shape[1] for x in of_block}
    hessians = sum(4 * k * k for k in inputs.values())
    # Beside its Hessian a solve has a damped copy and the factor of it.
    solves = [
        4 * k * k * 2
        + SOLVED_COPIES * 4 * sum(prod(x.shape) for x in of_block if x.shared_input == key)
        for key, k in inputs.items()
    ]
    return weights + hessians + max(live_bytes(spec, batch, width), *solves)


def _outside(run_size: RunSize) -> int:
    """Of a head or an embedding: codes and source whole, some runs of rows in fp32."""
    sizes = [prod(x.shape) for x, _ in run_size.linears if x.role in ("head", "embedding")]
    if not sizes:
        return 0
    solving = 0 if run_size.head is None else 3 * 4 * run_size.head.shape[1] ** 2
    return (
        max(sizes) * (run_size.dtype.itemsize + 2) + min(max(sizes), ROWS_AT_ONCE) * 4 * 7 + solving
    )


def _written(run_size: RunSize) -> int:
    """The whole model, its cache and the logits of a step, where it writes its own text."""
    assert run_size.calibration is not None
    if own_share(run_size.calibration) == 0:
        return 0
    return _sampled(
        run_size, run_size.dtype, run_size.calibration.samples, run_size.calibration.length
    )


def _sampled(run_size: RunSize, dtype: torch.dtype, count: int, length: int) -> int:
    # Late: a data-free run loads nothing that runs blocks.
    from compress.blocks.sample import sampling_bytes

    rows = sample_rows(run_size.spec, dtype, count, length)
    return sampling_bytes(run_size.model.tensors, run_size.spec, dtype, rows, length)


def sample_rows(spec: DecoderSpec, dtype: torch.dtype, count: int, length: int) -> int:
    """Sequences that are sampled at once."""
    from compress.blocks.sample import rows_at_once as at_once

    return min(count, at_once(spec, dtype, length))


def own_share(config: CalibrationConfig) -> float:
    """Share of the calibration tokens that the model writes itself."""
    sources = config.sources
    return sum(s.weight for s in sources if s.kind == "self") / sum(s.weight for s in sources)


def _evaluated(run_size: RunSize, config: EvaluationConfig, base: int) -> Iterator[MemoryNeed]:
    """Texts go through block by block; what the model writes, samples and tasks take it whole."""
    spec = run_size.spec
    sampled = partial(_sampled, run_size, torch.float32)
    for text in config.texts:
        if text.kind == "self":
            needed = base + sampled(text.samples, text.length)
            yield MemoryNeed(f"evaluation text {text.name!r}", needed, required=False)
    if config.texts:
        yield MemoryNeed(EVALUATION, base + _block_by_block(run_size, config))
    if config.samples.prompts:
        length = min(spec.context or DEFAULT_WINDOW_CAP, config.samples.tokens)
        needed = base + sampled(len(config.samples.prompts), length)
        yield MemoryNeed("samples", needed, required=False)
    if config.tasks:
        whole = (
            sampled(1, 1) if config.dtype == "fp32" else _sampled(run_size, torch.bfloat16, 1, 1)
        )
        yield MemoryNeed("tasks", base + whole, required=False)


def _block_by_block(run_size: RunSize, config: EvaluationConfig) -> int:
    """A block with a batch in it, then the heads with a chunk of logits; beside hidden states."""
    # Late: as above.
    from compress.plan.row_counts import chunk_rows

    spec, width = run_size.spec, 4 if config.dtype == "fp32" else 2
    tokens = evaluated_tokens(config)
    states = min(config.spill_bytes, tokens * spec.hidden * width)
    weights = max(sum(prod(x.shape) for x in block.linears) for block in spec.blocks)
    window = config.window or min(spec.context or DEFAULT_WINDOW_CAP, DEFAULT_WINDOW_CAP)
    batch = min(max(config.batch_tokens, window), max(tokens, 1))
    rows = min(chunk_rows(spec.vocab), max(tokens, 1))
    heads = LIVE_HEADS * 4 * spec.vocab * spec.hidden + LIVE_LOGITS * 4 * rows * spec.vocab
    in_block = weights * width + live_bytes(spec, batch, width)
    # The final states of the source wait while the result's pass through the blocks.
    return 2 * states + max(in_block, heads) + min(KEPT_BYTES, in_block, heads)


def block_of(linear: LinearSpec) -> str:
    """A key that is equal for linears of one block: the name up to its number."""
    head, _, _ = linear.name.partition(f".{linear.module.partition('.')[0]}.")
    return head
