"""Check what a written bitsandbytes checkpoint holds beyond names and shapes of its tensors."""

from collections.abc import Iterator, Mapping

import torch

from compress.arch.spec import DecoderSpec
from compress.checkpoint.dtypes import DTYPE_CODES
from compress.checkpoint.header import TensorInfo
from compress.checkpoint.reader import Checkpoint
from compress.errors import CheckpointError
from compress.formats import bitsandbytes
from compress.formats.bitsandbytes_weights import BitsandbytesWeights, open_side, read_scheme
from compress.formats.detect import detect
from compress.formats.names import module_of
from compress.quant.scheme import QuantScheme


def problems(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    schemes: Mapping[str, QuantScheme],
    source: Mapping[str, TensorInfo],
) -> Iterator[str]:
    """What is wrong, one line each: scales, columns and their weights, the quantization_config.

    schemes: of every quantized tensor. source: tensors of the original.
    """
    method = detect(checkpoint.config, ())
    if method != bitsandbytes.NAME:
        if schemes:
            yield f"config.json names the quantization {method!r}, not {bitsandbytes.NAME!r}"
        return
    dynamic = read_scheme(checkpoint.config)
    weights = BitsandbytesWeights(checkpoint, spec, dynamic, open_side(checkpoint))
    for name, scheme in schemes.items():
        got = weights.scheme(module_of(name))
        if got != scheme:
            say = "not quantized" if got is None else got.describe()
            yield f"{name}: the checkpoint says {say}, meant was {scheme.describe()}"
            continue
        yield from _values(weights, name, source[name])
    yield from _side_coverage(weights, schemes)
    yield from _skipped(checkpoint, spec, schemes)


def _values(weights: BitsandbytesWeights, name: str, source: TensorInfo) -> Iterator[str]:
    absmax = weights.checkpoint.read(f"{module_of(name)}.SCB")
    if not bool(torch.isfinite(absmax).all() & (absmax > 0).all()):
        yield f"{name}: its SCB is not finite and positive"
    try:
        outliers = weights.outliers(name)
    except CheckpointError as error:
        yield str(error)
        return
    if outliers is None:
        return
    if not bool(torch.isfinite(outliers.weight).all()):
        yield f"{name}: weights of its outlier columns are not finite"
    found = DTYPE_CODES[outliers.weight.dtype]
    if found != source.dtype:
        yield f"{name}: weights of its outlier columns are {found}, the source's {source.dtype}"


def _side_coverage(
    weights: BitsandbytesWeights, schemes: Mapping[str, QuantScheme]
) -> Iterator[str]:
    if weights.side is None:
        return
    modules = {module_of(name) for name in schemes}
    for name in weights.side.tensors:
        module, _, part = name.rpartition(".")
        if module not in modules or part not in ("columns", "weight"):
            yield f"{bitsandbytes.SIDE_FILE}: tensor {name} belongs to nothing"


def _skipped(
    checkpoint: Checkpoint, spec: DecoderSpec, schemes: Mapping[str, QuantScheme]
) -> Iterator[str]:
    """transformers makes every Linear 8-bit that the config does not name."""
    block = checkpoint.config["quantization_config"]
    named = set(block.get("llm_int8_skip_modules") or ())
    for linear in spec.all_linears():
        if (linear.tensor in schemes) == (linear.name in named):
            yield f"{linear.name}: llm_int8_skip_modules does not say whether it is quantized"
    if spec.head is None and "lm_head" not in named:
        yield "lm_head: llm_int8_skip_modules does not name it, but it is tied to the embedding"
