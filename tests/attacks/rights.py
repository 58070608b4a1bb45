"""What a process may do: as a plain user, also where the tests run as root."""

import ctypes
import os
import struct
from pathlib import Path

PLAIN, OTHER = "plain", "other"
NOBODY = 65534
_VERSION_3, _READ_SEARCH = 0x20080522, 2
_KEEP_CAPABILITIES = 8


def take(user: str) -> None:
    """Give up root's rights, for good. Does nothing for who is not root."""
    if user == "root" or os.geteuid() != 0:
        return
    if user == OTHER:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _keep(1 << _READ_SEARCH if user == OTHER else 0)


def _keep(mask: int) -> None:
    """Drop all capabilities but these."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("=II", _VERSION_3, 0))
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = ctypes.create_string_buffer(struct.pack("=6I", low, low, 0, high, high, 0))
    if libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def hand_over(folder: Path) -> None:
    """Make everything below a folder that user's own."""
    if os.geteuid() != 0:
        return
    for root, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            os.lchown(os.path.join(root, name), NOBODY, NOBODY)
