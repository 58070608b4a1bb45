"""The targets that an export can name: one folder, one row here."""

from collections.abc import Mapping
from types import MappingProxyType

from compress_exporters.exporter import Exporter
from compress_exporters.genai.target import GENAI
from compress_exporters.gguf.target import GGUF
from compress_exporters.onnx.target import ONNX
from compress_exporters.tensorrt.target import TENSORRT_READY

EXPORTERS: Mapping[str, Exporter] = MappingProxyType(
    {"onnx": ONNX, "onnx-genai": GENAI, "tensorrt": TENSORRT_READY, "gguf": GGUF}
)
