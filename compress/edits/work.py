"""What an edit that looks at data computes, counted before it starts."""

from dataclasses import dataclass
from math import prod

from compress.arch.spec import DecoderSpec
from compress.checkpoint.outline import Outline
from compress.edits.latent.queries import STEPS, TOKENS, Looked
from compress.edits.learned import WRITERS

# Of a block: the source's is run on and looked at, the edited one is looked at twice and run on.
FORWARDS = 5
# Fits of a linear: one for each penalty and the one that is kept, before and after the choice.
FITS = 12
PASSES = 2.25  # forward and back, and an eighth of the texts, held out, at two places
BACKWARD = 3  # forwards that a step of training costs


@dataclass(frozen=True, slots=True)
class Work:
    """Operations: of products with weights, of sums of x xT, and of solves in fp64."""

    products: float
    grams: float = 0.0
    solves: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.products + other.products, self.grams + other.grams, self.solves + other.solves
        )


@dataclass(frozen=True, slots=True, eq=False)
class EditSize:
    """A pass that changes the model. name: what it is called. model: what it reads. bytes: of
    memory that it works with. work: what it computes, where it looks at data. otherwise: options
    with which it takes less, as a command line sets them, and the bytes it takes then."""

    name: str
    model: Outline
    bytes: int
    work: Work | None = None
    otherwise: tuple[tuple[str, int], ...] = ()


def learned_work(source: Outline, tokens: int) -> Work:
    """Of an edit that goes site by site, over so many calibration tokens."""
    writers = [x.shape for x in source.spec.linears() if x.role in WRITERS]
    return Work(
        FORWARDS * 2.0 * tokens * _weights(source.spec),
        sum(tokens * k * (k + 2.0 * n) for n, k in writers),
        sum(FITS * (k**3 / 3 + 2.0 * n * k * k) + 4.0 * k**3 for n, k in writers),
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
    of_writers, hidden = learned_work(source, tokens), source.spec.hidden
    places = 2.0 * len(source.spec.blocks) + 1
    return Work(
        2 * of_writers.products,
        of_writers.grams + places * tokens * hidden * 4.0 * hidden,
        of_writers.solves + places * FITS * 2.4 * hidden**3,
    )


def training_work(student: Outline, given: Outline, tokens: int, rows: int, *, head: bool) -> Work:
    """Of a training on so many tokens. rows: tokens that the teacher reads once. head: whether the
    loss is one of next tokens."""
    own, teacher = _weights(student.spec), _weights(given.spec)
    if head:
        own += student.spec.vocab * student.spec.hidden
        teacher += given.spec.vocab * given.spec.hidden
    return Work(2.0 * (BACKWARD * tokens * own + rows * teacher))


def forward_work(model: Outline, tokens: int) -> float:
    """Products of one forward of so many tokens through all blocks."""
    return 2.0 * tokens * _weights(model.spec)


def _weights(spec: DecoderSpec) -> float:
    """Of all blocks, that a token is multiplied with: of experts, those it is sent to."""
    sent = spec.experts_per_token / spec.experts if spec.experts else 1.0
    return sum(prod(x.shape) * (1.0 if x.expert is None else sent) for x in spec.linears())
