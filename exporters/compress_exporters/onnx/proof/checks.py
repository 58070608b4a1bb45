"""Whether a graph computes what the checkpoint computes: logits, chunks, padding, tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

from compress.errors import CheckpointError
from compress.formats.weights import Weights
from compress_exporters.exporter import Proof
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.proof import openvino
from compress_exporters.onnx.proof.measuring import Error, Seen
from compress_exporters.onnx.proof.running import Runner
from compress_exporters.reference import LENGTH, Apart, Reference, fits, text

# Largest difference of a logit, for logits of size 1 and less; for larger ones in proportion.
LIMITS: Mapping[str, float] = {"fp32": 1e-4, "fp16": 2e-2}
# Norm of the difference by that of the logits, where inputs are rounded: one that lies between two
# codes may fall to either side, and in fp16 more of them do.
ROUNDED: Mapping[str, float] = {"fp32": 0.02, "fp16": 0.1}
OTHERWISE = 0.1  # the same where a runtime rounds inputs in a way of its own
VISIBLE = 5e-5  # parts of a norm that are shown
TOKENS = 16  # that are generated and compared
# Weights are decoded and multiplied as they are: no operator rounds inputs of its own accord.
EXACT: Mapping[str, str] = {"session.disable_quant_qdq": "1"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a proof looks at.

    limit: largest difference of a logit, as LIMITS. rounded: as ROUNDED. left: whether the target
    reads padding on the left. rounds: whether the graph rounds inputs as the source says; floats:
    to E4M3 with a fixed scale. config: of the session. usual: whether the graph is to run without
    any config too, where ONNX Runtime may round inputs. elsewhere: whether OpenVINO is to open it.
    length: tokens that the graph reads at once.
    """

    limit: float
    rounded: float = ROUNDED["fp32"]
    left: bool = True
    rounds: bool = False
    floats: bool = False
    config: Mapping[str, str] = field(default_factory=lambda: EXACT)
    usual: bool = False
    elsewhere: bool = False
    length: int = LENGTH

    @classmethod
    def of(cls, build: Build) -> "Asked":
        floats, dtype = bool(build.session), build.options.computed
        return cls(
            LIMITS[dtype],
            ROUNDED[dtype],
            rounds=build.rounds,
            floats=floats,
            usual=bool(build.fused("DequantizeLinear")) and not floats,
            elsewhere=True,
            length=length_of(build),
        )

    def allows(self, error: Error, seen: Seen) -> bool:
        """Whether a difference is small enough."""
        if self.rounds:
            return error.relative <= self.rounded
        return error.largest <= self._most(seen)

    def _most(self, seen: Seen) -> float:
        return self.limit * max(1.0, float(np.abs(seen.logits).max()))

    def shown(self, error: Error) -> str:
        """Also as a part of all logits, where that is more than arithmetic makes of it."""
        part = f", {error.relative:.2%} of their norm" if error.relative >= VISIBLE else ""
        return f"logits within {error.largest:.2g}{part}"

    def require(self, name: str, error: Error, seen: Seen) -> None:
        """CheckpointError for a difference that is too large."""
        if self.allows(error, seen):
            return
        allowed = f"{self.rounded:.0%} of their norm" if self.rounds else f"{self._most(seen):.3g}"
        raise CheckpointError(
            f"the graph's logits are not those of the weights: {name}, they differ by"
            f" {error.largest:.3g} ({error.relative:.2%}), and {allowed} is allowed; please report"
            " this with the model"
        )


def length_of(build: Build) -> int:
    """Tokens that a proof looks at: tables of positions end, and beyond some lengths rotations
    depend on what is in one call."""
    ends = [rope.length for rope in build.how.ropes if rope.length is not None]
    return min([LENGTH, build.options.max_context or LENGTH, *ends])


def require_form(model: Path) -> None:
    """By ONNX's own checker, with shapes inferred strictly; CheckpointError for what it finds."""
    errors = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError)
    try:
        onnx.checker.check_model(model, full_check=True)
    except errors as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{model} is no well-formed graph: {reason}") from error


def prove(source: Weights, model: Path, asked: Asked) -> Proof:
    """In ONNX Runtime, and in OpenVINO where that is asked and installed, against our decoder.
    CheckpointError for a graph that computes anything else; where the memory does not do for both,
    what can be proved without."""
    decoded = 4 * source.spec.all_numbers()
    if not fits(2 * decoded):
        return Proof("form", None, ("too little memory is free to open the graph",))
    runner = Runner.open(model, asked.config)
    if not fits(decoded):
        return Proof("loads", None, ("too little memory is free for the decoder it is held to",))
    proof, seen = compared(source, runner, asked)
    del runner  # what is opened next takes its memory
    more = [_usual(seen, model, asked)] if asked.usual else []
    more += [_elsewhere(seen, model, asked, 2 * decoded)] if asked.elsewhere else []
    return replace(proof, detail=(*proof.detail, *more))


def compared(source: Weights, runner: Runner, asked: Asked) -> tuple[Proof, Seen]:
    """Logits of a text in one step, in chunks and beside a padded one, then greedy tokens."""
    ids = text(source, asked.length)
    reference = Reference.load(source, inputs=asked.rounds)
    seen = Seen(ids, reference.logits(ids).numpy())
    errors = seen.errors(runner, left=asked.left)
    for name, error in errors.items():
        asked.require(name, error, seen)
    worst = max(error.largest for error in errors.values())
    detail = tuple(f"{name}: {asked.shown(error)}" for name, error in errors.items())
    # Rounded inputs differ by more than what decides a token, so there nothing counts as equal.
    slack = 0.0 if asked.rounds else 2 * worst
    prompt = ids[: max(1, len(ids) // 4)]
    count = min(TOKENS, len(ids) + 1 - len(prompt))
    apart = reference.apart(prompt, runner.greedy(np.array([prompt]), count), slack)
    level, told = _greedy(apart, count)
    return Proof(level, worst, (*detail, told)), seen


def _greedy(apart: Apart | None, count: int) -> tuple[Literal["logits", "tokens"], str]:
    if apart is None:
        return "tokens", f"{count} greedy tokens are the same"
    return "logits", (
        f"{apart.number} greedy tokens are the same, then it chooses {apart.chosen}, and the"
        f" weights {apart.wanted}, whose logit is {apart.by:.2g} above"
    )


def _usual(seen: Seen, model: Path, asked: Asked) -> str:
    """How near ONNX Runtime is without any config."""
    error = seen.error(Runner.open(model))
    if asked.allows(error, seen):
        return f"by default: {asked.shown(error)}"
    if not error.relative <= OTHERWISE:
        raise CheckpointError(
            f"as ONNX Runtime runs the graph by default, its logits differ by {error.relative:.2%}"
            " from those of the weights; please report this with the model"
        )
    return f"by default, where it rounds inputs to 8 bits in its own way: {asked.shown(error)}"


def _elsewhere(seen: Seen, model: Path, asked: Asked, needed: int) -> str:
    """How near OpenVINO is. needed: bytes to open the graph."""
    if not openvino.is_installed():
        return "OpenVINO is not installed (pip install openvino), so it was not asked"
    if not fits(needed):
        return "too little memory is free to open the graph in OpenVINO"
    name = openvino.name()
    try:
        errors = seen.errors(openvino.Compiled.open(model), left=asked.left)
    except CheckpointError as refused:  # the graph is right, as the above has shown
        return str(refused)
    worst = max(errors.values(), key=lambda error: error.relative)
    if asked.floats:
        if not all(math.isfinite(error.relative) for error in errors.values()):
            return f"{name} computes no numbers with fixed E4M3 scales of inputs"
        why = "as it rounds inputs with fixed E4M3 scales in its own way"
        return f"{name}: {asked.shown(worst)}, {why}"
    if asked.rounds and openvino.saturates() and OTHERWISE < worst.relative < 1:
        why = "as its 8-bit products are cut at 16 bits on a processor without VNNI, like this one"
        return f"{name}: {asked.shown(worst)}, {why}"
    # The largest input of a token lies between two codes, and falls to either.
    for what, error in errors.items():
        replace(asked, rounded=OTHERWISE).require(f"in {name}, {what}", error, seen)
    return f"{name}, in one step, in chunks and beside padding: {asked.shown(worst)}"
