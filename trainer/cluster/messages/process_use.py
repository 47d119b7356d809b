"""What a process of a job has used of its machine."""

from __future__ import annotations

import time
from dataclasses import dataclass

from foreload.base.memory import peak_bytes


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process has used so far: peak_bytes: the most memory that it had at once; processor_seconds: of all its threads."""

    peak_bytes: int = 0
    processor_seconds: float = 0.0

    @classmethod
    def now(cls) -> ProcessUse:
        """Of this process."""
        return cls(peak_bytes(), time.process_time())
