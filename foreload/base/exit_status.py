"""The status with which this process is about to end, for whoever must end it on the way."""

from __future__ import annotations

_about_to_end_with = 0


def note(status: int) -> int:
    """Note it, and return it."""
    global _about_to_end_with
    _about_to_end_with = status
    return status


def noted() -> int:
    """What was noted; 0 where nothing was."""
    return _about_to_end_with
