"""Every error that preparing or reading a schedule can raise. Each message is one line: field, rule, value received, remedy."""

from __future__ import annotations


class PipelineError(Exception):
    """Anything wrong in what a user gave to `prepare`, or in a schedule that is read."""


class FeatureError(PipelineError):
    """The feature file, or what is asked of its features, is not valid."""


class SourceError(PipelineError):
    """A source cannot be found, opened or read as what it is said to be."""


class RecordError(PipelineError):
    """More records are malformed than `--max-rejects` allows."""


class ScheduleError(PipelineError):
    """A schedule is missing, damaged, unfinished, failed, or does not fit what is asked of it."""


class SlotsError(PipelineError):
    """Too few slots for one step."""


class DiskError(PipelineError):
    """Too little disk space for the schedule."""
