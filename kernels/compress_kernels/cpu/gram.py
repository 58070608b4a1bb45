"""Sum of xᵀx: bf16 dot products by csrc/gram.cpp where the CPU has them, else fp32 by torch."""

import torch
from torch import Tensor

from compress_kernels.cpu.library import native
from compress_kernels.reference import gram as reference


def has_bf16() -> bool:
    """Whether the compiled kernels were built for a CPU with AVX512_BF16."""
    library = native().library
    return library is not None and bool(library.gram_bf16_supported())


def gram_(x: Tensor, out: Tensor) -> None:
    """As reference.gram.gram_."""
    if x.dtype != torch.bfloat16 or not has_bf16():
        reference.gram_(x, out)
        return
    library = native().library
    assert library is not None, "has_bf16 looked"
    x = x.contiguous()
    tokens, columns = x.shape
    threads = torch.get_num_threads()
    failed = library.gram_bf16(x.data_ptr(), tokens, columns, threads, out.data_ptr())
    if failed:
        raise MemoryError(f"no memory to pack {tokens} x {columns} bf16 values")
