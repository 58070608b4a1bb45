"""One way to reach the weight of any linear in a block: [out, in] whatever its module is."""

from torch import Tensor, nn

from compress.arch.spec import LinearSpec
from compress.errors import CheckpointError


def linear_weight(block: nn.Module, linear: LinearSpec) -> Tensor:
    """View [N, K] of a linear's weight inside a loaded block (Conv1D's is turned)."""
    module = block.get_submodule(linear.module)
    weight = module.weight
    assert isinstance(weight, Tensor), linear.module
    return weight.data.t() if is_conv1d(module) else weight.data


def linear_bias(block: nn.Module, linear: LinearSpec) -> Tensor:
    """View [N] of a linear's bias inside a loaded block; the linear must have one."""
    bias = block.get_submodule(linear.module).bias
    assert isinstance(bias, Tensor), linear.module
    return bias.data


def set_linear_weight(block: nn.Module, linear: LinearSpec, weight: Tensor) -> None:
    """Overwrite a linear's weight in place. weight: [N, K], cast to the block's dtype."""
    linear_weight(block, linear).copy_(weight)


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is transformers' Conv1D, whose weight lies [in, out]."""
    return type(module).__name__ == "Conv1D"


def check_linear(block: nn.Module, linear: LinearSpec) -> None:
    """CheckpointError unless the module is a matrix product of the spec's shape and order.

    Tables know this; for a decoder in no table the spec was read from names and shapes alone.
    """
    module = block.get_submodule(linear.module)
    kind = type(module).__name__
    weight = getattr(module, "weight", None)
    known = isinstance(module, nn.Linear) or is_conv1d(module) or linear.role == "router"
    if not known or not isinstance(weight, Tensor):
        raise CheckpointError(
            f"{linear.name} is a {kind} in transformers, not a linear layer; add it to `ignore`"
        )
    shape = tuple(weight.shape[::-1] if linear.transposed else weight.shape)
    if is_conv1d(module) != linear.transposed or shape != linear.shape:
        raise CheckpointError(
            f"{linear.name} is a {kind} with weight {list(weight.shape)} in transformers, the"
            f" tensors look like {list(linear.shape)} (transposed: {linear.transposed}); add it to"
            " `ignore`"
        )
