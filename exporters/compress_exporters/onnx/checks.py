"""Whether a graph computes what the checkpoint computes: logits, chunks, padding, tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx

from compress.errors import CheckpointError
from compress_exporters.exporter import Proof, Source
from compress_exporters.onnx.build import Build
from compress_exporters.onnx.running import Array, Runner
from compress_exporters.reference import LENGTH, Reference, fits, parameters, text

# Largest difference of a logit, for logits of size 1 and less; for larger ones in proportion.
LIMITS: Mapping[str, float] = {"fp32": 1e-4, "fp16": 2e-2}
# Norm of the difference by that of the logits, where inputs are rounded: one that lies between two
# codes may fall to either side, and in fp16 more of them do.
ROUNDED: Mapping[str, float] = {"fp32": 0.02, "fp16": 0.1}
USUAL = 0.1  # the same where ONNX Runtime rounds inputs of its own accord
TOKENS = 16  # that are generated and compared
PARTS = (7, 1, 1)  # tokens of the first chunks; the rest follows in one
# Weights are decoded and multiplied as they are: no operator rounds inputs of its own accord.
EXACT: Mapping[str, str] = {"session.disable_quant_qdq": "1"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a proof looks at.

    limit: largest difference of a logit, as LIMITS. rounded: as ROUNDED. left: whether the target
    reads padding on the left. rounds: whether the graph rounds inputs as the source says. config:
    of the session. usual: whether the graph is to run without any config too, where ONNX Runtime
    may round inputs. length: tokens that the graph reads at once.
    """

    limit: float
    rounded: float = ROUNDED["fp32"]
    left: bool = True
    rounds: bool = False
    config: Mapping[str, str] = field(default_factory=lambda: EXACT)
    usual: bool = False
    length: int = LENGTH

    @classmethod
    def of(cls, build: Build) -> "Asked":
        coded = bool(build.fused("DequantizeLinear"))
        usual = coded and not build.session
        dtype, length = build.options.dtype, length_of(build)
        return cls(LIMITS[dtype], ROUNDED[dtype], rounds=build.rounds, usual=usual, length=length)


@dataclass(frozen=True, slots=True)
class Error:
    """Of logits: the largest difference, and the norm of all by that of the logits."""

    largest: float
    relative: float

    @classmethod
    def of(cls, found: Array, want: Array) -> "Error":
        difference = found.astype(np.float32) - want
        size = float(np.linalg.norm(want))
        relative = float(np.linalg.norm(difference)) / size if size else 0.0
        return cls(float(np.abs(difference).max()), relative)


def length_of(build: Build) -> int:
    """Tokens that a proof looks at: tables of positions end, and beyond some lengths rotations
    depend on what is in one call."""
    ropes = (layer.rope for layer in build.how.layers)
    ends = [rope.length for rope in ropes if rope is not None and rope.length is not None]
    return min([LENGTH, build.options.max_context or LENGTH, *ends])


def require_form(model: Path) -> None:
    """By ONNX's own checker, with shapes inferred strictly; CheckpointError for what it finds."""
    errors = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError)
    try:
        onnx.checker.check_model(model, full_check=True)
    except errors as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{model} is no well-formed graph: {reason}") from error


def prove(source: Source, model: Path, asked: Asked) -> Proof:
    """In ONNX Runtime against our decoder. CheckpointError for a graph that computes anything else;
    where the memory does not do for both, what can be proved without."""
    decoded = 4 * parameters(source)
    if not fits(2 * decoded):
        return Proof("form", None, ("too little memory is free to open the graph",))
    runner = Runner.open(model, asked.config)
    if not fits(decoded):
        return Proof("loads", None, ("too little memory is free for the decoder it is held to",))
    proof = compared(source, runner, asked)
    if not asked.usual:
        return proof
    return replace(proof, detail=(*proof.detail, _usual(source, model, asked.length)))


def compared(source: Source, runner: Runner, asked: Asked) -> Proof:
    """Logits of a text in one step, in chunks and beside a padded one, then greedy tokens."""
    ids = text(source, asked.length)
    reference = Reference.load(source, inputs=asked.rounds)
    want = reference.logits(ids).numpy()
    errors = {
        f"{len(ids)} tokens in one step": Error.of(runner.whole(np.array([ids]))[0], want),
        "the same in chunks": Error.of(_chunks(runner, ids), want),
    }
    for side in ("right", "left")[: 1 + asked.left]:
        errors[f"beside a text padded on the {side}"] = _padded(runner, ids, side, want)
    for name, error in errors.items():
        _require(name, error, want, asked)
    worst = max(error.largest for error in errors.values())
    detail = tuple(f"{name}: logits within {_shown(x, asked)}" for name, x in errors.items())
    # Rounded inputs differ by more than what decides a token, so there nothing counts as equal.
    slack = 0.0 if asked.rounds else 2 * worst
    prompt = ids[: max(1, len(ids) // 4)]
    count = min(TOKENS, len(ids) + 1 - len(prompt))
    apart = reference.apart(prompt, runner.greedy(np.array([prompt]), count), slack)
    if apart is None:
        return Proof("tokens", worst, (*detail, f"{count} greedy tokens are the same"))
    number, wanted = apart
    told = f"greedy tokens are the same up to token {number}, {wanted} there"
    return Proof("logits", worst, (*detail, told))


def _shown(error: Error, asked: Asked) -> str:
    part = f" ({error.relative:.2%} of them)" if asked.rounds else ""
    return f"{error.largest:.2g}{part}"


def _require(name: str, error: Error, want: Array, asked: Asked) -> None:
    limit = asked.limit * max(1.0, float(np.abs(want).max()))
    if error.relative <= asked.rounded if asked.rounds else error.largest <= limit:
        return
    allowed = f"{asked.rounded:.0%} of them" if asked.rounds else f"{limit:.3g}"
    raise CheckpointError(
        f"the graph's logits are not those of the weights: {name}, they differ by"
        f" {error.largest:.3g} ({error.relative:.2%}), and {allowed} is allowed; please report this"
        " with the model"
    )


def _usual(source: Source, model: Path, length: int) -> str:
    """How near ONNX Runtime is without any config."""
    ids = text(source, length)
    want = Reference.load(source).logits(ids).numpy()
    error = Error.of(Runner.open(model).whole(np.array([ids]))[0], want)
    if not error.relative <= USUAL:
        raise CheckpointError(
            f"as ONNX Runtime runs the graph by default, its logits differ by {error.relative:.2%}"
            " from those of the weights; please report this with the model"
        )
    return f"by default, where it may round inputs to 8 bits: logits within {error.relative:.2%}"


def _chunks(runner: Runner, ids: Sequence[int]) -> Array:
    at, past, found = 0, None, []
    for size in (*PARTS, len(ids)):
        part = np.array([ids[at : at + size]])
        if part.size:
            at += part.shape[1]
            logits, past = runner.step(part, np.ones((1, at), np.int64), past)
            found.append(logits[0])
    return np.concatenate(found)


def _padded(runner: Runner, ids: Sequence[int], side: str, want: Array) -> Error:
    """A batch of the text and of a shorter one, which is its beginning."""
    short = max(1, len(ids) // 2)
    place = slice(len(ids) - short, len(ids)) if side == "left" else slice(0, short)
    batch, mask = np.zeros((2, len(ids)), np.int64), np.zeros((2, len(ids)), np.int64)
    batch[0], mask[0] = ids, 1
    batch[1, place], mask[1, place] = ids[:short], 1
    logits, _ = runner.step(batch, mask)
    both = np.concatenate([logits[0], logits[1][place]])
    return Error.of(both, np.concatenate([want, want[:short]]))
