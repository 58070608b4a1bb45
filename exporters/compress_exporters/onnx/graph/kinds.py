"""Attention of each kind of layer."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import onnx_ir as ir

from compress.arch.forward.kinds import Grouped, Latent
from compress.arch.spec import BlockSpec
from compress_exporters.onnx.graph.attention import grouped_attention
from compress_exporters.onnx.graph.build import Build
from compress_exporters.onnx.graph.latent import latent_attention

KINDS: Mapping[type, Callable[[Build, BlockSpec, ir.Value], ir.Value]] = MappingProxyType(
    {Grouped: grouped_attention, Latent: latent_attention}
)


def attention(build: Build, block: BlockSpec, x: ir.Value) -> ir.Value:
    """x: [B, S, hidden], behind the norm -> what attention adds to the residual."""
    return KINDS[type(build.how.layers[block.index])](build, block, x)
