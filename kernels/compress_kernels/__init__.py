"""Numerical kernels, each as plain torch (the reference), compiled C++ (CPU) and Triton (GPU).

The references in `compress_kernels.reference` are the specification. Public ops pick by device.
"""

from compress_kernels.gptq.factor import hessian_factor
from compress_kernels.gptq.problem import ColumnResult, FixedScales, Grid, SearchedScales
from compress_kernels.ops.columns import gptq_columns
from compress_kernels.ops.gram import gram_
from compress_kernels.ops.scale import group_scale
from compress_kernels.ops.super_blocks import decode_blocks, round_blocks, settle_blocks
from compress_kernels.status import paths, status

__all__ = [
    "ColumnResult",
    "FixedScales",
    "Grid",
    "SearchedScales",
    "decode_blocks",
    "gptq_columns",
    "gram_",
    "group_scale",
    "hessian_factor",
    "paths",
    "round_blocks",
    "settle_blocks",
    "status",
]
