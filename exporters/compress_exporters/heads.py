"""Heads of the layers, for containers that have one number of them for all layers."""

from compress.arch.forward.forward import ForwardSpec
from compress.arch.forward.kinds import Grouped
from compress.errors import CheckpointError


def shared_heads(how: ForwardSpec, target: str) -> Grouped:
    """The kind of the first layer; its heads are those of all.

    target: what has no place for more. Raises CheckpointError where a layer has other heads.
    """
    first = how.grouped(0)
    for index in range(len(how.kinds)):
        layer = how.grouped(index)
        if (layer.heads, layer.cache()) != (first.heads, first.cache()):
            raise CheckpointError(
                f"layer {index} has {_heads(layer)}, layer 0 {_heads(first)}; {target} has one"
                " number for all layers, export to onnx"
            )
    return first


def _heads(layer: Grouped) -> str:
    return (
        f"{layer.heads} heads ({layer.kv_heads} KV) of {layer.key_width} and {layer.value_width}"
        " numbers"
    )
