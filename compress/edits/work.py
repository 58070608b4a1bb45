"""What an edit that looks at data computes, counted before it starts."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from math import prod

from compress.arch.spec import DecoderSpec
from compress.checkpoint.outline import Outline
from compress.distill.muon import STEPS as MUON_STEPS
from compress.edits.latent.queries import STEPS, TOKENS, Looked
from compress.edits.learned import WRITERS
from compress_calibration.config import CalibrationConfig

# Of a block: the source's is run on and looked at, the edited one is looked at twice and run on.
FORWARDS = 5
# Fits of a linear: one for each penalty and the one that is kept, before and after the choice.
FITS = 12
PASSES = 2.25  # forward and back, and an eighth of the texts, held out, at two places
BACKWARD = 3  # forwards that a step of training costs
# Passes over what a step of the optimizer moves, in fp32: clipping, moments, the step, the copy.
MOVES = 16


@dataclass(frozen=True, slots=True)
class Work:
    """Operations: of products with weights, of sums of x xT, of solves in fp64, and of products
    that are fp32 whatever blocks compute in.

    passages: tokens that go through a block, each forward; those of a backward count BACKWARD - 1
    more. They have attention and element-wise passes beside their products. logits: numbers that
    go through a softmax. moved: bytes of element-wise passes over weights and their states.
    """

    products: float
    grams: float = 0.0
    solves: float = 0.0
    wide: float = 0.0
    passages: float = 0.0
    logits: float = 0.0
    moved: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, x.name) + getattr(other, x.name) for x in fields(self)))

    def __rmul__(self, times: float) -> "Work":
        return Work(*(times * getattr(self, x.name) for x in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class EditSize:
    """A pass that changes the model. name: what it is called. model: what it reads. bytes: of
    memory that it works with. work: what it computes, where it looks at data; length: of the rows
    of that. written: data of its own, beside the recipe's, with text that the model may have to
    write. otherwise: options with which it takes less, as a command line sets them, and the bytes
    it takes then."""

    name: str
    model: Outline
    bytes: int
    work: Work | None = None
    length: int = 0
    written: CalibrationConfig | None = None
    otherwise: tuple[tuple[str, int], ...] = ()


def learned_work(source: Outline, tokens: int) -> Work:
    """Of an edit that goes site by site, over so many calibration tokens."""
    writers = [x.shape for x in source.spec.linears() if x.role in WRITERS]
    return FORWARDS * forward_work(source, tokens) + Work(
        0.0,
        grams=sum(1.0 * tokens * k * k for _, k in writers),
        solves=sum(FITS * (k**3 / 3 + 2.0 * n * k * k) + 4.0 * k**3 for n, k in writers),
        wide=sum(2.0 * tokens * n * k for n, k in writers),
    )


def looked_work(result: Outline, tokens: int, length: int) -> Work:
    """Of refitting the queries of all blocks, on so many tokens in texts of a length."""
    spec, sizes = result.spec, result.spec.blocks[0].sizes
    assert sizes.latent is not None, "it has no latent"
    looked, width, hidden = Looked.of(tokens, sizes.heads, length), sizes.key_width, spec.hidden
    cached, queries = sizes.latent.rank + sizes.latent.rotated, min(tokens, TOKENS) / looked.tokens
    each = hidden * width + width * sizes.latent.rank + length * cached
    scores = 2.0 * queries * sizes.heads * each
    inverses = 2.0 * STEPS * sizes.heads * (width**3 + width * hidden * (width + hidden))
    blocks = len(spec.blocks)
    return Work(blocks * STEPS * PASSES * scores, solves=blocks * (inverses + 2.0 * hidden**3))


def narrowing_work(source: Outline, tokens: int) -> Work:
    """Of an edit that narrows the residual stream: it walks the source once before, and looks at
    what reads the stream as well as at what writes it."""
    hidden, places = source.spec.hidden, 2.0 * len(source.spec.blocks) + 1
    before = FORWARDS * forward_work(source, tokens)
    return (
        learned_work(source, tokens)
        + before
        + Work(
            0.0,
            grams=places * tokens * hidden * 4.0 * hidden,
            solves=places * FITS * 2.4 * hidden**3,
        )
    )


@dataclass(frozen=True, slots=True)
class Lessons:
    """How long a training goes on. learned: tokens of all steps. measured: those of all looks at
    held-out rows. taught: those that its teacher reads. recompute: whether blocks compute again
    for the gradients."""

    learned: int
    measured: int = 0
    taught: int = 0
    recompute: bool = False


def training_work(student: Outline, given: Outline, lessons: Lessons, *, head: bool) -> Work:
    """Of a training, without its optimizer. head: whether the loss is one of next tokens."""
    forwards = (BACKWARD + lessons.recompute) * lessons.learned + lessons.measured
    work = forward_work(student, forwards) + forward_work(given, lessons.taught)
    if not head:
        return work
    own = BACKWARD * lessons.learned + lessons.measured
    products = head_products(student.spec, own) + head_products(given.spec, lessons.taught)
    # The gradient by the logits comes with the loss.
    student_logits = (lessons.learned + lessons.measured) * student.spec.vocab
    return work + Work(products, logits=1.0 * student_logits + lessons.taught * given.spec.vocab)


def optimizer_work(numbers: int, matrices: Collection[tuple[int, ...]], steps: int) -> Work:
    """Of so many steps that move so many weights. matrices: shapes of those of which muon makes the
    momentum orthogonal, in fp32."""
    turned = sum(map(_orthogonal, matrices))
    return Work(0.0, wide=steps * turned, moved=4.0 * MOVES * steps * numbers)


def _orthogonal(shape: tuple[int, ...]) -> float:
    """A step of muon: x xT, its square, and that by x, at each step of the iteration."""
    small, large = sorted(shape)
    return MUON_STEPS * (4.0 * small * small * large + 2.0 * small**3)


def forward_work(model: Outline, tokens: float) -> Work:
    """One forward of so many tokens through all blocks."""
    spec = model.spec
    return Work(2.0 * tokens * _weights(spec), passages=1.0 * tokens * len(spec.blocks))


def head_products(spec: DecoderSpec, tokens: float) -> float:
    """Products of the logits of so many tokens."""
    return 2.0 * tokens * spec.vocab * spec.hidden


def _weights(spec: DecoderSpec) -> float:
    """Of all blocks, that a token is multiplied with: of experts, those it is sent to."""
    sent = spec.experts_per_token / spec.experts if spec.experts else 1.0
    return sum(prod(x.shape) * (1.0 if x.expert is None else sent) for x in spec.linears())
