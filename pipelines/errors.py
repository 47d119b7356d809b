"""What can go wrong while logs become a schedule, and while that is read."""

from __future__ import annotations

import errno
from pathlib import Path

from foreload.base.errors import ForeloadError
from foreload.base.files import is_full


class PipelineError(ForeloadError):
    """Anything wrong in what a user gave to `prepare`, or in a schedule that is read."""

    code = "pipeline"


class FeatureError(PipelineError):
    """The feature file, or what is asked of its features, is not valid."""

    code = "features"
    permanent = True


class SourceError(PipelineError):
    """A source cannot be found, opened or read as what it is said to be."""

    code = "source"


class RecordError(PipelineError):
    """More records are malformed than `--max-rejects` allows."""

    code = "records"


class ScheduleError(PipelineError):
    """A schedule is missing, damaged, unfinished, failed, or does not fit what is asked of it."""

    code = "schedule"


class SlotsError(PipelineError):
    """Too few slots for one step."""

    code = "slots"
    permanent = True


class DiskError(PipelineError):
    """Too little disk space for the schedule, or a disk that cannot be written."""

    code = "disk"


def disk_error(error: BaseException, out: Path) -> DiskError | None:
    """A DiskError for an error that the disk of --out is to blame for: it is full, fails, was made read-only, or has gone. None for another error."""
    if not isinstance(error, OSError):
        return None
    if is_full(error):
        return DiskError(f"--out {out}: the disk is full; free space or choose another folder")
    if error.errno not in (errno.EIO, errno.EROFS, errno.EFBIG, errno.ENXIO, errno.ENODEV, errno.ESTALE):
        return None
    return DiskError(f"--out {out}: the disk must let itself be written; got {error}; choose another folder")
