"""Rows as codes of few bits give them back: what a product with rounded inputs sees."""

import torch
from torch import Tensor

from compress_kernels.cpu import through_codes as cpu_through_codes
from compress_kernels.cpu.library import native
from compress_kernels.ops.checks import require, wrong
from compress_kernels.reference import through_codes as reference
from compress_kernels.rounding import CodeRounding


def through_codes(x: Tensor, rounding: CodeRounding) -> Tensor:
    """x: fp32 or bf16 [rows, n] -> the nearest codes times their scales, the same shape and dtype.

    A scale is max |x| / largest of its group, the dtype's epsilon where that is 0; codes are
    x / scale, cut off at the largest ones and rounded, ties to even; in bf16 scale, quotient and
    product are rounded to it, each by itself. NaN or infinity makes its group NaN; with
    a scale that is given NaN stays, and infinity becomes the largest code. LLM.int8()'s rows are
    seen in fp16 and computed in fp32, numbers that reach the threshold left out.
    Raises ValueError on another shape or dtype, and for LLM.int8() with other scales.
    """
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16):
        raise wrong("x", x, "torch.float32 or torch.bfloat16 [rows, n]")
    if rounding.codes == "llm.int8":
        own = rounding.group == 0 and rounding.scale is None
        require(own, "rounding", "of groups or fixed", "a scale of each row for llm.int8")
    compiled = x.device.type == "cpu" and native().library is not None and x.numel() > 0
    run = cpu_through_codes.through_codes if compiled else reference.through_codes
    return run(x, rounding)
