"""Memory and processor time of a process: how much memory it may still take, taking it in huge pages, and what it has used."""

from __future__ import annotations

import contextlib
import mmap
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HUGE_BYTES = 2 << 20  # of a huge page on x86-64 and arm64


def zeros_in_huge_pages(shape: tuple[int, ...], dtype: type, dumped: bool = True) -> np.ndarray:
    """An array of zeros, aligned to a huge page, and in huge pages where the kernel gives them; where it does not, access is slower, no more.

    dumped=False leaves it out of core dumps.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    # One page more than asked for, so that there is an aligned start; pages that are never touched take no memory.
    memory = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
        if not dumped:
            memory.madvise(mmap.MADV_DONTDUMP)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % HUGE_BYTES
    return whole[start : start + size].view(dtype).reshape(shape)


def available_bytes() -> int:
    """Memory that can be had without swapping, by the kernel's estimate and the control group's limit; 0 where that is not known."""
    limits = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        limits.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    for limit, used in (  # control groups, version 2 and version 1
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: there is no limit
            folder = Path("/sys/fs/cgroup")
            limits.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
    return max(min(limits, default=0), 0)


def peak_bytes() -> int:
    """The most memory that this process has had at once, resident; 0 where that is not known."""
    # Not getrusage's: that begins with what the process had from which this one was made.
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 0


def total_bytes() -> int:
    """Memory of this machine, or of the control group's limit where that is less; 0 where that is not known."""
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
    """What a process has used so far: peak_bytes: the most memory that it had at once; processor_seconds: of all its threads."""

    peak_bytes: int = 0
    processor_seconds: float = 0.0

    @classmethod
    def now(cls) -> ProcessUse:
        """Of this process."""
        return cls(peak_bytes(), time.process_time())
