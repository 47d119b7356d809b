"""What a folder of checkpoints is written by, be it local or in an object store: how it is held, how one is deleted, what left-overs are cleared."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Literal

from foreload.base.codec import parse_json
from foreload.pipelines.schedule.at_work import at_work
from foreload.trainer.checkpoints.contents import MANIFEST
from foreload.trainer.errors import FolderBusy
from foreload.trainer.storage import AnyFolder, ObjectPath

LOCK = ".saving"
"""In a local folder of checkpoints, held while one is saved or deleted there."""

LEFT_OVER_AFTER = timedelta(days=1)
"""When what others have put into an object store, and no manifest names, is taken for left over."""


def folder_of(step: int | Literal["*"]) -> str:
    """What the folder of a checkpoint is called, or the pattern of these names. step: the last one trained."""
    return f"step-{step}"


@contextmanager
def holding(folder: AnyFolder, what: str) -> Iterator[None]:
    """Hold a folder of checkpoints, so that none goes of which an increment is being saved; in an object store nobody can. what: the field or
    checkpoint, in messages.

    Raises FolderBusy where another process holds it, OSError where it cannot be written to.
    """
    with ExitStack() as stack:
        if not isinstance(folder, ObjectPath):
            try:
                stack.enter_context(at_work(folder / LOCK))
            except BlockingIOError as error:
                raise FolderBusy(f"{what}: another checkpoint is being saved in {folder} right now; wait for it") from error
        yield


def removed(path: AnyFolder) -> None:
    """Delete a checkpoint: from its first moment on there is none. Raises OSError and CheckpointUnreachable."""
    # Whoever is killed leaves none half deleted, but what the next one that is saved there clears away.
    folder = path.resolve()
    if isinstance(folder, ObjectPath):
        (folder / MANIFEST).unlink()
        folder.remove()
        return
    going = folder.with_name(f".{folder.name}.{os.urandom(8).hex()}.tmp")
    folder.rename(going)
    shutil.rmtree(going)


def draft_name(owner: str) -> str:
    """What the files of a checkpoint lie under that is being saved in an object store. owner: who saves one at a time, a run."""
    return f"{owner}-{os.urandom(8).hex()}"


def clear_left_overs(folder: ObjectPath, owner: str) -> None:
    """Delete from an object store what no manifest names: what an owner has left, who saves nothing at the moment, and what is old.

    Raises CheckpointUnreachable.
    """
    now = datetime.now(UTC)
    drafts: dict[tuple[str, str], datetime] = {}  # when the last file was put into each
    manifests = set()
    for name, (_, put) in folder.objects().items():
        step, _, inside = name.partition("/")
        draft, _, _ = inside.rpartition("/")
        if inside == MANIFEST:
            manifests.add(step)
        elif re.fullmatch(r"step-\d+", step):
            drafts[step, draft] = max(put, drafts.get((step, draft), put))
    steps = {step for step, _ in drafts}
    kept = {step: _drafts_of(folder / step) for step in steps & manifests}
    for (step, draft), put in drafts.items():
        named = kept.get(step, set())
        if named is None or draft in named or not (draft.startswith(f"{owner}-") or now - put > LEFT_OVER_AFTER):
            continue
        if draft:
            (folder / step / draft).remove()
        elif step not in manifests:
            (folder / step).remove()
    # Where a folder becomes empty, an object may be made that stands for it.
    for step in steps - manifests:
        if not any((folder / step).objects()):
            (folder / step).remove()


def _drafts_of(checkpoint: ObjectPath) -> set[str] | None:
    """Under which names the files of a checkpoint lie; None where its manifest does not say."""
    try:
        manifest = parse_json((checkpoint / MANIFEST).read_bytes())
        names = [str(file["name"]) for file in (*manifest["rows"], manifest["dense"])]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return {name.rpartition("/")[0] for name in names}
