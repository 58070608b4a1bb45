"""Whether a graph computes what the checkpoint computes: logits, chunks, padding, tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from compress.errors import CheckpointError
from compress_exporters.exporter import Options, Proof, Source
from compress_exporters.onnx.running import Array, Runner
from compress_exporters.reference import Reference, fits, parameters, text

# Largest difference of a logit, for logits of size 1 and less; for larger ones in proportion.
LIMITS: Mapping[str, float] = {"fp32": 1e-4, "fp16": 2e-2}
TOKENS = 16  # that are generated and compared
PARTS = (7, 1, 1)  # tokens of the first chunks; the rest follows in one


@dataclass(frozen=True, slots=True)
class Asked:
    """What a proof looks at.

    limit: largest difference of a logit, as LIMITS. left: whether the target reads padding on the
    left. inputs: whether the graph rounds inputs as the source says. config: of the session.
    """

    limit: float
    left: bool = True
    inputs: bool = False
    config: Mapping[str, str] | None = None

    @classmethod
    def of(cls, options: Options) -> "Asked":
        return cls(LIMITS[options.dtype])


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
    size = sum(path.stat().st_size for path in model.parent.glob(f"{model.name}*"))
    if not fits(2 * size):
        return Proof("form", None, ("too little memory is free to open the graph",))
    runner = Runner.open(model, asked.config)
    reference_bytes = 4 * parameters(source)
    if not fits(2 * reference_bytes):
        return Proof("loads", None, ("too little memory is free for the decoder it is held to",))
    return compared(source, runner, asked)


def compared(source: Source, runner: Runner, asked: Asked) -> Proof:
    """Logits of a text in one step, in chunks and beside a padded one, then greedy tokens."""
    ids = text(source)
    reference = Reference.load(source, inputs=asked.inputs)
    want = reference.logits(ids).numpy()
    limit = asked.limit * max(1.0, float(np.abs(want).max()))
    errors = {
        f"{len(ids)} tokens in one step": _error(runner.whole(np.array([ids]))[0], want),
        "the same in chunks": _error(_chunks(runner, ids), want),
    }
    for side in ("right", "left")[: 1 + asked.left]:
        errors[f"beside a text padded on the {side}"] = _padded(runner, ids, side, want)
    for name, error in errors.items():
        if not error <= limit:
            raise CheckpointError(
                f"the graph's logits are not those of the weights: {name}, they differ by"
                f" {error:.3g}, and {limit:.3g} is allowed; please report this with the model"
            )
    worst = max(errors.values())
    detail = tuple(f"{name}: logits within {error:.2g}" for name, error in errors.items())
    same = _tokens(runner, reference, ids[: max(1, len(ids) // 4)], worst)
    return Proof("tokens" if same is None else "logits", worst, (*detail, same or SAME))


SAME = f"{TOKENS} greedy tokens are the same"


def _error(found: Array, want: Array) -> float:
    return float(np.abs(found.astype(np.float32) - want).max())


def _chunks(runner: Runner, ids: Sequence[int]) -> Array:
    at, past, found = 0, None, []
    for size in (*PARTS, len(ids)):
        part = np.array([ids[at : at + size]])
        if part.size:
            at += part.shape[1]
            logits, past = runner.step(part, np.ones((1, at), np.int64), past)
            found.append(logits[0])
    return np.concatenate(found)


def _padded(runner: Runner, ids: Sequence[int], side: str, want: Array) -> float:
    """A batch of the text and of a shorter one, which is its beginning."""
    short = max(1, len(ids) // 2)
    place = slice(len(ids) - short, len(ids)) if side == "left" else slice(0, short)
    batch, mask = np.zeros((2, len(ids)), np.int64), np.zeros((2, len(ids)), np.int64)
    batch[0], mask[0] = ids, 1
    batch[1, place], mask[1, place] = ids[:short], 1
    logits, _ = runner.step(batch, mask)
    return max(_error(logits[0], want), _error(logits[1][place], want[:short]))


def _tokens(
    runner: Runner, reference: Reference, prompt: Sequence[int], error: float
) -> str | None:
    """None where both choose the same tokens; else where they part. A choice between two logits
    that are nearer than the error is none."""
    found, so_far = runner.greedy(np.array([prompt]), TOKENS), list(prompt)
    for number, token in enumerate(found):
        logits = reference.logits(so_far, len(prompt))[-1]
        if float(logits.max() - logits[token]) > 2 * error:
            return f"greedy tokens are the same up to token {number}, {int(logits.argmax())} there"
        so_far.append(token)
    return None
