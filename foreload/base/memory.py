"""Memory and processor time of a process.

This covers the memory that a process may still take, arrays in huge pages, and what it has used.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HUGE_BYTES = 2 << 20  # bytes of a huge page on x86-64 and arm64


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: type, dumped: bool = True) -> np.ndarray:
    """Return an array of zeros, aligned to a huge page.

    It is in huge pages if the kernel provides them. If not, access is only slower.

    Args:
        dumped: whether core dumps contain the array.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    # Ask for one huge page more, so that there is an aligned start. Pages that are never touched
    # take no memory.
    memory = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
        if not dumped:
            memory.madvise(mmap.MADV_DONTDUMP)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_BYTES
    return whole[start : start + size].view(dtype).reshape(shape)


def available_bytes() -> int:
    """Return the memory that can be had without swapping, or 0 if that is unknown.

    It is bounded by the kernel's estimate and the control group's limit.
    """
    limits = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        limits.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    # Control groups of version 2, then of version 1.
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        # The text "max" is not a number, and means that there is no limit.
        with contextlib.suppress(OSError, ValueError):
            folder = Path("/sys/fs/cgroup")
            limits.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
    return max(min(limits, default=0), 0)


def peak_bytes() -> int:
    """Return the peak resident memory of this process, or 0 if it is unknown."""
    # getrusage would be wrong: its peak starts with that of the process that created this one.
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 0


def total_bytes() -> int:
    """Return the memory of this machine, or 0 if it is unknown.

    If the control group has a lower limit, that is returned.
    """
    limits = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        limits.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:")))
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((Path("/sys/fs/cgroup") / limit).read_text()))
    return min(limits, default=0)


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process has used so far.

    Attributes:
        peak_bytes: its peak resident memory.
        processor_seconds: the processor time of all its threads.
    """

    peak_bytes: int = 0
    processor_seconds: float = 0.0

    @classmethod
    def now(cls) -> ProcessUse:
        """Measure this process."""
        return cls(peak_bytes(), time.process_time())


def processor_seconds_of(process: int) -> float:
    """Return the processor time of another process of this machine, or 0 if that is unknown."""
    # The name, in parentheses, may contain anything. Behind it, user and system time are the 12th
    # and the 13th field, in clock ticks.
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
