"""What an op is given must fit: compiled code reads memory by shape, dtype and strides alone.

The messages are made where something is wrong only: a step of one token calls a hundred ops.
"""

from torch import Tensor


def wrong(name: str, tensor: Tensor, wanted: str) -> ValueError:
    """To be raised: what the tensor is, and what would be right."""
    return ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; {wanted} is needed")


def require_whole(name: str, tensor: Tensor | None) -> None:
    """ValueError unless a tensor, if there is one, lies in memory without gaps, in order."""
    if tensor is not None and not tensor.is_contiguous():
        strides = list(tensor.stride())
        raise ValueError(f"{name} has strides {strides}; a contiguous tensor is needed")
