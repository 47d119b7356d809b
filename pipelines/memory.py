"""How much memory a process may still take."""

from __future__ import annotations

import contextlib
from pathlib import Path


def available_bytes() -> int:
    """Memory that can be had without swapping, by the kernel's estimate and the control group's limit; 0 where nothing tells."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: there is no limit
            group = Path("/sys/fs/cgroup")
            found.append(int((group / limit).read_text()) - int((group / used).read_text()))
    return max(min(found, default=0), 0)
