"""What lanes.json says of the rows that a run keeps (`kept_lanes`)."""

from __future__ import annotations

from dataclasses import dataclass

from foreload.base.codec import Name
from foreload.trainer.run.manifest import Manifest, Status


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file beside `lanes.json`.

    Attributes:
        name: In the folder of `lanes.json`.
        sha256: SHA-256 of its bytes.
    """

    name: Name
    sha256: str


@dataclass(frozen=True, slots=True)
class KeptLanes:
    """What `lanes.json` says.

    Attributes:
        why: The reason why training ended.
        manifest: The run's manifest once the rows are on the store.
        status: The run's status once the rows are on the store.
        dense: The file of the dense part.
        files: One file per lane, in order.
    """

    why: str
    manifest: Manifest
    status: Status
    dense: KeptFile
    files: tuple[KeptFile, ...]
