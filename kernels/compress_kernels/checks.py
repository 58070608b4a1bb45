"""What an op is given must fit: compiled code reads memory by shape, dtype and strides alone."""

from torch import Tensor


def require(good: bool, name: str, tensor: Tensor, wanted: str) -> None:
    """ValueError with what the tensor is and what would be right, unless `good`."""
    if not good:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; {wanted} is needed")


def require_whole(name: str, tensor: Tensor | None) -> None:
    """ValueError unless a tensor, if there is one, lies in memory without gaps, in order."""
    if tensor is not None and not tensor.is_contiguous():
        strides = list(tensor.stride())
        raise ValueError(f"{name} has strides {strides}; a contiguous tensor is needed")
