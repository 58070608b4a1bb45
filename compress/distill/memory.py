"""Bytes that a training holds, from shapes alone: what a plan shows and refuses by."""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from math import prod

from compress.arch.spec import BlockSpec, DecoderSpec
from compress.blocks.live import MAX_BATCH_TOKENS, MAX_LIVE, live_bytes
from compress.checkpoint.outline import Outline
from compress.distill.head import CHUNK_ELEMENTS
from compress.distill.optimizer import OptimizerName

FP32 = 4
LOGITS = 1 << 24  # numbers of them at once, where gradients are taken and a row has no more; 64 MiB
# What autograd keeps of a token in a block, in numbers: so many times the hidden size, once and for
# each norm; the width of all queries; the inner width. Chosen experts keep their inputs and outputs
# besides. Against what it kept of tiny models of 10 families and of tale-6m: 4 % less (gemma2) to
# 24 % more (llama; opt 97 %).
_KEPT_HIDDEN, _KEPT_NORM, _KEPT_QUERIES, _KEPT_INNER, _KEPT_EXPERT = 2, 4, 4, 4, 2
# Buffers of a chunk of logits while the losses of both models are taken.
_CHUNK_BUFFERS = 7
# Bytes beside the offset of a weight whose code moves: where it begins, the weight itself, and for
# backward its code, the code that it moved to and whether that was free.
_MOVED = FP32 + FP32 + 3
WALKED_STATES = 256 << 20  # bytes of hidden states in memory
# Bytes of the states of a batch that a teacher reads. Of tale-6m a core walks 4,050 tokens a second
# 16 rows of 256 at a time, 3,690 with 64 and 2,890 with 256: what is larger leaves the caches.
TEACHER_BATCH = 8 << 20


@dataclass(frozen=True, slots=True)
class TrainingBytes:
    """By what they are for. weights: of the student, and where it computes in 16 bits those of what
    is trained in fp32 too; so are gradients there twice. best: the copy of the best state.
    activations: what a micro-batch keeps for backward, counted in fp32. logits: the chunk, and the
    head's gradients as they add up. teacher: its weights in fp32 with a forward of its own, where
    it is resident."""

    weights: int
    gradients: int
    optimizer: int
    best: int
    activations: int
    logits: int = 0
    teacher: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch. checkpointed: blocks keep their inputs only, and are computed twice."""

    rows: int
    length: int
    checkpointed: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def model_bytes(
    student: Outline,
    trained: Collection[tuple[int, ...]],
    batch: MicroBatch,
    optimizer: OptimizerName = "adamw",
    teacher: Outline | None = None,
    width: int = FP32,
) -> TrainingBytes:
    """Of scope "model". trained: shapes of what is trained, see `all_shapes` and `adapter_shapes`.
    teacher: where a whole one is in memory. width: bytes of a number that is computed with."""
    spec = student.spec
    kept = [_kept(spec, block) for block in spec.blocks]
    within = max(kept) if batch.checkpointed else sum(kept)
    states = len(kept) * spec.hidden if batch.checkpointed else 0
    chunk = _CHUNK_BUFFERS * FP32 * CHUNK_ELEMENTS
    head = prod(spec.head_shape or spec.embedding_shape)
    masters, gradients, state, best = _trained_bytes(trained, optimizer, width)
    return TrainingBytes(
        width * _numbers(student) + masters,
        gradients,
        state,
        best,
        FP32 * batch.tokens * (within + states + 4 * spec.hidden),
        chunk + 2 * FP32 * head,
        0 if teacher is None else _teacher(teacher, batch),
    )


def block_bytes(
    student: Outline,
    batch: MicroBatch,
    optimizer: OptimizerName = "adamw",
    *,
    moving: bool = False,
    width: int = FP32,
) -> TrainingBytes:
    """Of scope "block", for the largest of them; the teacher's block is freed by then. moving:
    whether codes of its weights move. width: as of `model_bytes`."""
    every = [_of_block(student, block, batch, optimizer, width) for block in student.spec.blocks]
    most = max(every, key=lambda needs: needs.total)
    return replace(most, weights=most.weights * (FP32 + _MOVED) // FP32) if moving else most


def gradient_rows(length: int, vocab: int) -> int:
    """Rows of `length` tokens whose gradients are taken together."""
    return max(1, LOGITS // (length * vocab))


def gradient_bytes(model: Outline, length: int) -> int:
    """Of gradients of all linears, a few rows of `length` tokens at a time: weights and gradients
    in fp32, what backward needs, and the logits of those rows three times."""
    shapes = [x.shape for x in model.spec.linears()]
    batch = MicroBatch(gradient_rows(length, model.spec.vocab), length)
    logits = batch.tokens * model.spec.vocab
    needs = model_bytes(model, shapes, batch)
    return needs.weights + needs.gradients + needs.activations + 3 * FP32 * logits


def walked_bytes(model: Outline, rows: int, length: int, *, head: bool) -> int:
    """Of a walk over a model's blocks with so many rows, about: a block with a batch in it, or the
    head with a chunk of logits, beside hidden states. head: whether the walk ends there."""
    spec, tokens = model.spec, rows * length
    batch = min(tokens, max(length, MAX_BATCH_TOKENS))
    if head:
        batch = min(batch, max(length, TEACHER_BATCH // (2 * 2 * spec.hidden)))
    weights = max(sum(prod(x.shape) for x in block.linears) for block in spec.blocks)
    live = live_bytes(spec, batch, FP32)
    if not head:
        live = min(live, max(MAX_LIVE, live_bytes(spec, length, FP32)))
    in_block = FP32 * weights + live
    of_head = FP32 * (prod(spec.head_shape or spec.embedding_shape) + 3 * CHUNK_ELEMENTS)
    states = min(WALKED_STATES, FP32 * tokens * spec.hidden)
    return states + max(in_block, of_head if head else 0)


def all_names(student: Outline) -> list[str]:
    """Tensors that `train: all` trains."""
    spec = student.spec
    blocks = (tensor for block in spec.blocks for tensor, _ in block.modules)
    return list(dict.fromkeys([*blocks, *(tensor for tensor, _ in spec.outside)]))


def all_shapes(student: Outline) -> list[tuple[int, ...]]:
    """Of what `train: all` trains."""
    return [student.tensors[name].shape for name in all_names(student)]


def some_shapes(student: Outline, names: Collection[str]) -> list[tuple[int, ...]]:
    """Of what is trained where these tensors alone are."""
    return [student.tensors[name].shape for name in all_names(student) if name in names]


def adapter_shapes(spec: DecoderSpec, rank: int) -> list[tuple[int, ...]]:
    """Of what `train: lora` trains."""
    linears = [x for block in spec.blocks for x in block.linears if x.role != "router"]
    shapes: list[tuple[int, ...]] = [(rank, linear.shape[1]) for linear in linears]
    return shapes + [(linear.shape[0], rank) for linear in linears]


def tuned_shapes(student: Outline, stored: Outline) -> list[tuple[int, ...]]:
    """Of what `train: [scales, norms]` trains, at most: all that has one dimension, and the scales.
    stored: the checkpoint of codes; what it has of floats beside the student's own are scales."""
    floats = [x for x in stored.tensors.values() if x.dtype in ("F32", "F16", "BF16")]
    scales = [x.shape for x in floats if x.name not in student.tensors]
    return scales + [x for x in all_shapes(student) if len(x) == 1]


def _of_block(
    student: Outline, block: BlockSpec, batch: MicroBatch, optimizer: OptimizerName, width: int
) -> TrainingBytes:
    own = [
        student.tensors[tensor].shape
        for tensor in dict.fromkeys(tensor for tensor, _ in block.modules)
    ]
    masters, gradients, state, best = _trained_bytes(own, optimizer, width)
    numbers = sum(prod(shape) for shape in own)
    # The states that enter, the target, the output and their difference beside what is kept.
    kept = _kept(student.spec, block) + 4 * student.spec.hidden
    weights, activations = width * numbers + masters, FP32 * batch.tokens * kept
    return TrainingBytes(weights, gradients, state, best, activations)


def _trained_bytes(
    trained: Collection[tuple[int, ...]], optimizer: OptimizerName, width: int
) -> tuple[int, int, int, int]:
    """Weights in fp32 behind those of 16 bits (compress.distill.masters), gradients, optimizer's
    state, best state."""
    numbers = sum(prod(shape) for shape in trained)
    factored = sum(_factored(shape) for shape in trained)
    state = {"adamw": 2 * numbers, "muon": 2 * numbers, "adafactor": factored}  # muon: at most
    masters, own = (FP32, width) if width < FP32 else (0, 0)
    gradients = (FP32 + own) * numbers
    return masters * numbers, gradients, FP32 * state[optimizer], FP32 * numbers


def _factored(shape: tuple[int, ...]) -> int:
    """Numbers that Adafactor keeps of a tensor: of a matrix a row and a column."""
    if len(shape) < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]


def _kept(spec: DecoderSpec, block: BlockSpec) -> int:
    """Numbers that backward needs of a token in a block."""
    sizes, weights = block.sizes, {linear.tensor for linear in block.linears}
    norms = sum(t not in weights and t.endswith(".weight") for t, _ in block.modules)
    queries = sizes.heads * sizes.key_width or spec.hidden
    numbers = (_KEPT_HIDDEN + _KEPT_NORM * norms) * spec.hidden + _KEPT_QUERIES * queries
    if not sizes.experts or sizes.dense:
        return numbers + _KEPT_INNER * (sizes.intermediate or 4 * spec.hidden)
    each = _KEPT_INNER * (sizes.expert or sizes.intermediate) + _KEPT_EXPERT * spec.hidden
    return numbers + spec.experts_per_token * each


def _teacher(teacher: Outline, batch: MicroBatch) -> int:
    """Weights, and one block's forward: nothing is kept, but a block's own tensors are there."""
    widest = max(_kept(teacher.spec, block) for block in teacher.spec.blocks)
    return FP32 * (_numbers(teacher) + batch.tokens * widest)


def _numbers(model: Outline) -> int:
    return sum(prod(shape) for shape in all_shapes(model))
