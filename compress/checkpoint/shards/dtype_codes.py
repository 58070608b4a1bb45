"""The dtype codes of safetensors and their sizes; what torch calls them is in `dtypes`."""

from collections.abc import Mapping
from types import MappingProxyType

# F4, F6_E2M3 and F6_E3M2 are left out: they are smaller than a byte, and torch has no such tensor.
ITEMSIZES: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "F8_E8M0": 1,
        "F8_E4M3FNUZ": 1,
        "F8_E5M2FNUZ": 1,
        "C64": 8,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U64": 8,
        "U32": 4,
        "U16": 2,
        "U8": 1,
        "BOOL": 1,
    }
)
# What weights are stored in that nobody has quantized.
PLAIN_DTYPES = ("BF16", "F16", "F32")


def itemsize(code: str) -> int:
    """Bytes of one element of a dtype code in ITEMSIZES."""
    return ITEMSIZES[code]
