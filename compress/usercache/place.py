"""Where the cache lies and how large it may grow, as the user's environment says."""

import os
from pathlib import Path

from compress.byte_sizes import EXPECTED, byte_size
from compress.errors import RequestError

SETTING = "COMPRESS_MODEL_CACHE"
MOST_BYTES = 2_000_000_000
_OFF = ("0", "off")


def cache_folder() -> Path:
    """The user's cache folder of this program, that of compiled kernels too; not made here."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "compress-model"


def made_folder() -> Path:
    """Where texts and evaluations lie; not made here."""
    return cache_folder() / "made"


def most_bytes() -> int:
    """Bytes that they may take; 0 where the user wants none. RequestError for what is no size."""
    asked = os.environ.get(SETTING, "").strip()
    if not asked:
        return MOST_BYTES
    if asked.lower() in _OFF:
        return 0
    found = byte_size(asked)
    if found is None:
        raise RequestError(f"{SETTING} is {asked!r}: {EXPECTED}, or 0 for no cache")
    return found
