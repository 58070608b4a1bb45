"""Checkpoint codecs: how a QuantizedTensor is laid out in a file that other runtimes read."""

from compress.formats.format import Format
from compress.formats.kv_cache import FP8_CACHE, INT8_CACHE, kv_encode, kv_layout
from compress.formats.runtimes.verdicts import Verdict
from compress.formats.table import FORMATS
from compress.formats.weights import CodedWeights, Weights, logical_shapes, open_weights

__all__ = [
    "FORMATS",
    "FP8_CACHE",
    "INT8_CACHE",
    "CodedWeights",
    "Format",
    "Verdict",
    "Weights",
    "kv_encode",
    "kv_layout",
    "logical_shapes",
    "open_weights",
]
