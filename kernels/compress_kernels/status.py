"""Which kernels this machine runs, for `doctor`."""

import importlib.util

import torch

from compress_kernels.cpu import gram, library


def status() -> dict[str, str]:
    """One line each for `cpu`, `cpu_gram` and `gpu`; builds the compiled kernels if need be."""
    native = library.native()
    built = native.library is not None
    return {
        "cpu": f"compiled: {native.reason}" if built else f"torch, slower: {native.reason}",
        "cpu_gram": "bf16 dot products (AVX512_BF16)" if gram.has_bf16() else "fp32 by torch",
        "gpu": _gpu(),
    }


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none found"
    if importlib.util.find_spec("triton") is None:
        return "torch, slower: triton is not installed (extra `gpu`)"
    return f"triton on {torch.cuda.get_device_name()}"
