"""The canonical graph as TensorRT's parser takes it."""

from dataclasses import replace

from compress_exporters.onnx.graph.canonical import CANONICAL
from compress_exporters.onnx.graph.linear import linear_by
from compress_exporters.tensorrt.attention import attend
from compress_exporters.tensorrt.linears import LINEARS, as_rounded

TENSORRT = replace(CANONICAL, attend=attend, linear=linear_by(LINEARS), rounded=as_rounded)
