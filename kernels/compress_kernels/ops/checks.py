"""What an op is given must fit: compiled code reads memory by shape, dtype and strides alone.

The messages are made where something is wrong only: a step of one token calls a hundred ops.
"""

import importlib.util

import torch
from torch import Tensor

from compress_kernels.cpu.library import SCALE_KINDS
from compress_kernels.gptq.problem import Grid


def wrong(name: str, tensor: Tensor, wanted: str) -> ValueError:
    """To be raised: what the tensor is, and what would be right."""
    return ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; {wanted} is needed")


def require_whole(name: str, tensor: Tensor | None) -> None:
    """ValueError unless a tensor, if there is one, lies in memory without gaps, in order."""
    if tensor is not None and not tensor.is_contiguous():
        strides = list(tensor.stride())
        raise ValueError(f"{name} has strides {strides}; a contiguous tensor is needed")


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def require(right: bool, name: str, is_now: str, wanted: str) -> None:
    if not right:
        raise ValueError(f"{name} is {is_now}; {wanted} is needed")


def require_matrix(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    require(tuple(tensor.shape) == shape, name, f"shape {list(tensor.shape)}", f"{list(shape)}")
    require(tensor.dtype == dtype, name, f"{tensor.dtype}", f"{dtype}")
    require(tensor.device == device, name, f"on {tensor.device}", f"{device}")


def require_grid(grid: Grid) -> None:
    dtype = grid.scale_dtype
    require(2 <= grid.bits <= 8, "bits", str(grid.bits), "2 to 8")
    require(dtype in SCALE_KINDS, "scale_dtype", f"{dtype}", "fp32, bf16 or fp16")


def ratios_of(ratios: Tensor, symmetric: bool, device: torch.device) -> Tensor:
    right = ratios.dim() == 1 and ratios.numel() > 0
    require(right, "ratios", f"shape {list(ratios.shape)}", "[R], not empty,")
    if symmetric:
        nonzero = bool(((ratios != 0) & ratios.isfinite()).all())
        require(nonzero, "ratios", f"{ratios.tolist()}", "values that are finite and not 0")
    else:
        positive = bool((ratios > 0).all())
        require(positive, "ratios", f"{ratios.tolist()}", "positive values")
    return ratios.to(device, torch.float32).contiguous()
