"""The plain graph: operators of ONNX itself, opset 23."""

from types import MappingProxyType

from compress_exporters.onnx.graph.attention import attend
from compress_exporters.onnx.graph.build import Lowering
from compress_exporters.onnx.graph.ends import embedding, head
from compress_exporters.onnx.graph.kinds import attention
from compress_exporters.onnx.graph.linear import LINEARS, linear_by
from compress_exporters.onnx.graph.mlp import mlp
from compress_exporters.onnx.graph.norms import add_norm, norm
from compress_exporters.onnx.graph.rounding import as_rounded

CANONICAL = Lowering(
    opsets=MappingProxyType({"": 23}),
    positions=True,
    embedding=embedding,
    norm=norm,
    add_norm=add_norm,
    attention=attention,
    attend=attend,
    mlp=mlp,
    linear=linear_by(LINEARS),
    rounded=as_rounded,
    head=head,
)
