"""What lanes.json says of the rows that a run keeps (`kept_lanes`)."""

from __future__ import annotations

from dataclasses import dataclass

from foreload.base.codec import Name
from foreload.trainer.run.manifest import Manifest, Status


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file beside `lanes.json`. sha256: of its bytes."""

    name: Name
    sha256: str


@dataclass(frozen=True, slots=True)
class KeptLanes:
    """What `lanes.json` says. why: training ended; manifest, status: of the run once the rows are on the store; dense: the file of the dense part;
    files: of each lane.
    """

    why: str
    manifest: Manifest
    status: Status
    dense: KeptFile
    files: tuple[KeptFile, ...]
