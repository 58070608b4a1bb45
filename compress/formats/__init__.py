"""Checkpoint codecs: how a QuantizedTensor is laid out in a file that other runtimes read."""

from compress.formats.coded_weights import CodedWeights
from compress.formats.format import Format
from compress.formats.kv_cache import FP8_CACHE, INT8_CACHE, kv_encode, kv_layout
from compress.formats.open_weights import open_coded, open_weights
from compress.formats.runtimes.verdicts import Verdict
from compress.formats.table import CODECS, FORMATS
from compress.formats.weights import Weights

__all__ = [
    "CODECS",
    "FORMATS",
    "FP8_CACHE",
    "INT8_CACHE",
    "CodedWeights",
    "Format",
    "Verdict",
    "Weights",
    "kv_encode",
    "kv_layout",
    "open_coded",
    "open_weights",
]
