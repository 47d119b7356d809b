"""Trains recommendation models exactly, with embedding tables larger than memory, and keeps training when machines die."""

from foreload.pipelines.errors import ForeloadError

__all__ = ["ForeloadError"]
