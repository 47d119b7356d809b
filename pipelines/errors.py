"""The errors of preparing and reading a schedule."""

from __future__ import annotations

import errno
from pathlib import Path

from foreload.base.errors import ForeloadError
from foreload.base.files import is_full


class PipelineError(ForeloadError):
    """The base class of errors in the input of `prepare`, and in a schedule that is read."""

    code = "pipeline"


class FeatureError(PipelineError):
    """The feature file is not valid, or lacks a feature that was asked for."""

    code = "features"
    permanent = True


class SourceError(PipelineError):
    """A source cannot be found, opened, or read in its format."""

    code = "source"


class RecordError(PipelineError):
    """More records are malformed than `--max-rejects` allows."""

    code = "records"


class ScheduleError(PipelineError):
    """A schedule is missing, damaged, unfinished, failed, or does not fit the request."""

    code = "schedule"


class SlotsError(PipelineError):
    """There are too few slots for one step."""

    code = "slots"
    permanent = True


class DiskError(PipelineError):
    """There is too little disk space for the schedule, or the disk cannot be written."""

    code = "disk"


def disk_error(error: BaseException, out: Path) -> DiskError | None:
    """Return a DiskError if the disk of --out caused an error, else None.

    The disk is full, fails, was made read-only, or was removed.
    """
    if not isinstance(error, OSError):
        return None
    if is_full(error):
        return DiskError(f"--out {out}: the disk is full; free space or choose another folder")
    if error.errno not in (errno.EIO, errno.EROFS, errno.EFBIG, errno.ENXIO, errno.ENODEV, errno.ESTALE):
        return None
    return DiskError(f"--out {out}: the disk must let itself be written; got {error}; choose another folder")
