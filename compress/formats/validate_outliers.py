"""Check the side file of a written bitsandbytes checkpoint: outlier columns and their weights."""

from collections.abc import Iterator, Mapping

import torch

from compress.checkpoint.shards.dtypes import DTYPE_CODES
from compress.checkpoint.shards.header import TensorInfo
from compress.errors import CheckpointError
from compress.formats.bitsandbytes import codec as bitsandbytes
from compress.formats.coded_weights import CodedWeights
from compress.formats.names import module_of
from compress.quant.scheme import QuantScheme


def problems(
    weights: CodedWeights, schemes: Mapping[str, QuantScheme], source: Mapping[str, TensorInfo]
) -> Iterator[str]:
    """What is wrong with the side file, one line each; nothing where there is none.

    schemes: of every quantized tensor. source: tensors of the original.
    """
    if weights.side is None:
        return
    for name in schemes:
        yield from _outliers(weights, name, source[name])
    modules = {module_of(name) for name in schemes}
    for name in weights.side.tensors:
        module, _, part = name.rpartition(".")
        if module not in modules or part not in ("columns", "weight"):
            yield f"{bitsandbytes.SIDE_FILE}: tensor {name} belongs to nothing"


def _outliers(weights: CodedWeights, name: str, source: TensorInfo) -> Iterator[str]:
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
