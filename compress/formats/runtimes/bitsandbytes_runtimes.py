"""Which runtimes take a bitsandbytes result: facts about loaders, as data.

transformers was tried (tests/interop repeats it); what concerns vLLM on GPU was read in its source
(bitsandbytes.py and bitsandbytes_loader.py) and is called "expected" for that.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

from compress.arch.spec import DecoderSpec
from compress.formats.runtimes.verdicts import TRIED_IN_TRANSFORMERS
from compress.quant.scheme import QuantScheme

Found = tuple[str, Literal["yes", "expected", "no"], str]


def verdicts(spec: DecoderSpec, schemes: Mapping[str, QuantScheme]) -> list[Found]:
    """(runtime, verdict, reason) of each. schemes: of every quantized tensor, by name."""
    calibrated = any(
        s.activation is not None and s.activation.outliers == "calibrated" for s in schemes.values()
    )
    note = "; finds outlier columns itself, not those of the calibration" if calibrated else ""
    reason, against = next(_vllm(spec, schemes), None), next(_transformers(spec, schemes), None)
    gpu: Found = ("vLLM on GPU", "expected", f"on one device, in fp16{note}")
    tried = spec.family in TRIED_IN_TRANSFORMERS
    known: Literal["yes", "expected"] = "yes" if tried else "expected"
    return [
        gpu if reason is None else ("vLLM on GPU", "no", reason),
        ("vLLM on CPU", "no", "vLLM 0.32 for CPU refuses bitsandbytes checkpoints"),
        ("transformers", known, f"with bitsandbytes and accelerate{note}")
        if against is None
        else ("transformers", "no", against),
    ]


def _transformers(spec: DecoderSpec, schemes: Mapping[str, QuantScheme]) -> Iterator[str]:
    """Tried on a CPU: its view of inputs fails on those that do not lie row by row."""
    for linear in spec.linears():
        if linear.role == "kv_b" and linear.tensor in schemes:
            yield (
                f"{linear.name}: bitsandbytes 0.50 does not read latents as they lie in memory;"
                " leave it as it is (ignore)"
            )


def _vllm(spec: DecoderSpec, schemes: Mapping[str, QuantScheme]) -> Iterator[str]:
    if spec.experts:
        yield "it has no 8-bit bitsandbytes kernels for mixtures of experts"
    for linear in spec.all_linears():
        quantized = linear.tensor in schemes
        if quantized and linear.transposed:
            yield f"{linear.name} is a Conv1D: its loader would transpose the codes"
        if quantized and linear.role == "head":
            yield f"{linear.name}: its output head takes no bitsandbytes weights"
        if not quantized and linear.fused is not None:
            yield (
                f"{linear.name} is not quantized, but the matrix that it is fused into goes by"
                " another name than the one llm_int8_skip_modules has"
            )
