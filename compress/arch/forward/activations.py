"""Activations by the names that config.json has for them, those of transformers."""

ACTIVATIONS = (
    "silu",
    "swish",
    "gelu",
    "gelu_python",
    "gelu_new",
    "gelu_fast",
    "gelu_accurate",
    "gelu_pytorch_tanh",
    "gelu_python_tanh",
    "quick_gelu",
    "relu",
    "relu2",
    "sigmoid",
    "tanh",
    "linear",
)
