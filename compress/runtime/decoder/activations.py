"""Activations by transformers' names."""

from collections.abc import Mapping
from types import MappingProxyType

from compress_kernels.ops.rows import Function

# Name of `arch.activations` -> what compress_kernels.ops.rows calls it.
FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
        "quick_gelu": "quick_gelu",
        "relu": "relu",
        "relu2": "relu2",
        "sigmoid": "sigmoid",
        "tanh": "tanh",
        "linear": "linear",
    }
)
