"""What a process's C library does with memory that is freed. Imports nothing: the Python interface must stay cheap to import."""

from __future__ import annotations

import contextlib
import ctypes

KEEPS_FREED = {"mmap_threshold": 32 << 20, "trim_threshold": 1 << 30, "top_pad": 64 << 20}
"""What has glibc keep memory that is freed, up to a gigabyte, instead of giving it back and faulting it in again. The first is its greatest value."""
_MALLOPT = {"mmap_threshold": -3, "trim_threshold": -1, "top_pad": -2}  # glibc's numbers


def keep_freed() -> None:
    """Have this process keep memory that it frees (KEEPS_FREED), for arrays of the sizes that pieces have. Other C libraries are left as they are."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for name, value in KEEPS_FREED.items():
            library.mallopt(_MALLOPT[name], value)
