"""What a process on a CPU does with the memory that a training step frees."""

from __future__ import annotations

import ctypes
import platform

MMAP_THRESHOLD = 4 << 20
"""Bytes. Tensors from this size on are mapped one by one and given back when they are freed."""
_M_MMAP_THRESHOLD = -3  # malloc.h of glibc


def return_freed_tensors() -> bool:
    """Have glibc return large tensors to the system as they are freed; False where malloc is another's.

    By default its threshold grows to 32 MiB as blocks are freed (mallopt(3)), so that the activations of a step end up
    on a heap that fragments: a step of a drafter with hidden size 1024 held 3.1 GB at its peak instead of 2.8.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD))
