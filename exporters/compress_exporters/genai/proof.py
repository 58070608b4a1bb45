"""Whether a folder for onnxruntime-genai computes what the checkpoint computes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from compress.errors import CheckpointError
from compress.formats.weights import Weights
from compress_exporters.exporter import Proof
from compress_exporters.genai import texts
from compress_exporters.genai.running import generated, kernels
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.proof.checks import LIMITS, TOKENS, Asked, length_of, prove
from compress_exporters.onnx.proof.measuring import Error
from compress_exporters.onnx.proof.running import Runner
from compress_exporters.onnx.saving import MODEL
from compress_exporters.packages import installed
from compress_exporters.reference import Reference, text

# Norm of the difference by that of the logits, where products round their inputs to int8.
ROUNDED = 0.02
EXACT = "exact.onnx"
# Kinds of which ONNX Runtime must run as many as the graph has.
FUSED = (
    "GroupQueryAttention",
    "MatMulNBits",
    "GatherBlockQuantized",
    "SkipSimplifiedLayerNormalization",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "LayerNormalization",
)


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """Our decoder's logits of a text."""

    reference: Reference
    ids: Sequence[int]

    @classmethod
    def of(cls, source: Weights, length: int) -> "_Seen":
        return cls(Reference.load(source), text(source, length))


def prove_folder(source: Weights, folder: Path, build: Build) -> Proof:
    """CheckpointError for anything that is wrong."""
    coded = bool(build.fused("MatMulNBits"))
    asked = Asked(LIMITS[build.options.computed], left=False, length=length_of(build))
    if not (coded and build.options.accuracy_level):
        proof = prove(source, folder / MODEL, asked)
    else:
        with _exact(folder) as exact:
            proof = prove(source, exact, asked)
    if proof.max_logit_error is None:
        return proof
    seen = _Seen.of(source, asked.length)
    if coded and build.options.accuracy_level:
        proof = _rounded(proof, seen, folder)
    ran = _kernels(build, kernels(folder / MODEL, seen.ids))
    return _generated(replace(proof, detail=(*proof.detail, ran)), seen, folder)


@contextmanager
def _exact(folder: Path) -> Iterator[Path]:
    """The graph beside itself, with products that leave their inputs as they are."""
    model = onnx.load(folder / MODEL, load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    path = folder / EXACT
    try:
        path.write_bytes(model.SerializeToString())
        yield path
    finally:
        path.unlink(missing_ok=True)


def _rounded(proof: Proof, seen: _Seen, folder: Path) -> Proof:
    """With the graph as it is; `proof` was of products that leave their inputs as they are."""
    want = seen.reference.logits(seen.ids).numpy()
    error = Error.of(Runner.open(folder / MODEL).whole(np.array([seen.ids]))[0], want)
    if not error.relative <= ROUNDED:
        raise CheckpointError(
            f"with inputs rounded to int8 (accuracy level 4) logits differ by {error.relative:.2%}"
            f" from those of the weights, and {ROUNDED:.0%} is allowed; take --accuracy-level 0"
        )
    exact = tuple(f"accuracy level 0, {line}" for line in proof.detail)
    line = (
        f"accuracy level 4: logits within {error.largest:.2g}, {error.relative:.2%} of their size"
    )
    # The tokens so far are those of the exact graph.
    return replace(proof, level="logits", max_logit_error=error.largest, detail=(*exact, line))


def _kernels(build: Build, ran: dict[str, int]) -> str:
    """CheckpointError where ONNX Runtime takes an operator apart."""
    made = build.fused(*FUSED)
    for kind, count in made.items():
        if ran.get(kind, 0) < count:
            raise CheckpointError(
                f"ONNX Runtime runs {ran.get(kind, 0)} of the graph's {count} {kind};"
                " please report this with its version"
            )
    casts = ran.get("Cast", 0) - build.fused("Cast").get("Cast", 0)
    more = f"; it adds {casts} casts, as it computes in fp32" if casts > 0 else ""
    return f"ONNX Runtime runs all {sum(made.values())} fused operators as they are{more}"


def _generated(proof: Proof, seen: _Seen, folder: Path) -> Proof:
    if not installed("onnxruntime_genai"):
        line = "onnxruntime-genai is not installed, so it generated nothing"
        return replace(proof, detail=(*proof.detail, line))
    assert proof.max_logit_error is not None
    prompt = seen.ids[: max(1, len(seen.ids) // 4)]
    count = min(TOKENS, len(seen.ids) - len(prompt))
    if not count:
        line = "the folder is for texts of one token, to which onnxruntime-genai adds none"
        return replace(proof, detail=(*proof.detail, line))
    found = generated(folder, prompt, count)
    apart = seen.reference.apart(prompt, found, 2 * proof.max_logit_error)
    if apart is not None:
        raise CheckpointError(
            f"onnxruntime-genai chooses other tokens than the weights from token {apart.number} on;"
            " please report this with the model"
        )
    said = texts.told(folder)
    cut = () if said is None else (said,)
    line = f"onnxruntime-genai: {len(found)} greedy tokens are the same"
    return replace(proof, level="tokens", detail=(*proof.detail, *cut, line))
