"""How this process asks for memory and threads; to be settled before torch is imported."""

import ctypes
import os
import sys

# mallopt's M_MMAP_THRESHOLD, and the size from which a block goes back to the system when freed.
_MMAP_THRESHOLD, _BYTES = -3, 4 << 20


def settle() -> None:
    """Give freed tensors back, and let waiting threads sleep; what the user has set stays.

    glibc keeps freed blocks below 32 MB: reading 30 tensors of 30 MB one after the other left
    246 MB resident, with this 0. Mapped blocks are then backed by huge pages, without which
    filling one takes 91 ms instead of 17. OpenMP threads that spin at every barrier cost a shared
    machine more than waking them does: 64 x 128 sampled tokens took 23 CPU seconds beside other
    work, 4 with sleeping ones.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BYTES)
    except AttributeError:  # a C library without mallopt: nothing to tune
        return
