"""A checkpoint while it is being written, in a local folder or in an object store.

Nobody sees it before it is published, and then it is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from foreload.base.codec import parse_json
from foreload.base.files import is_full, put_in_place, remove_path, remove_unfinished
from foreload.pipelines.schedule.at_work import at_work
from foreload.trainer.checkpoints.contents import MANIFEST, Checkpoint, Contents
from foreload.trainer.errors import CheckpointError, CheckpointUnreachable, FolderBusy
from foreload.trainer.run.directory import CODE
from foreload.trainer.run.manifest import write_code
from foreload.trainer.storage import AnyFolder, ObjectPath, holds

LOCK = ".saving"
"""The lock file in a local folder of checkpoints, held while one is saved or deleted there."""

LEFT_OVER_AFTER = timedelta(days=1)
"""The age from which objects that no manifest names count as left over, of any owner."""


def folder_of(step: int | Literal["*"]) -> str:
    """Return the name of a checkpoint's folder, or for "*" the pattern of such names.

    Args:
        step: The last step trained.
    """
    return f"step-{step}"


@contextmanager
def holding(folder: AnyFolder, what: str) -> Iterator[None]:
    """Hold the lock of a folder of checkpoints.

    Nobody can delete a checkpoint there while an increment of it is being saved. An object store
    has no locks: nothing is held there.

    Args:
        folder: The folder of checkpoints.
        what: The field or the checkpoint that messages name.

    Raises:
        FolderBusy: Another process holds the lock.
        OSError: The folder cannot be written to.
    """
    with ExitStack() as stack:
        if not isinstance(folder, ObjectPath):
            try:
                stack.enter_context(at_work(folder / LOCK))
            except BlockingIOError as error:
                raise FolderBusy(
                    f"{what}: another checkpoint is being saved in {folder} right now; wait until it is finished"
                ) from error
        yield


def removed(path: AnyFolder) -> None:
    """Delete a checkpoint; from the first change on, it no longer is one.

    Raises OSError and CheckpointUnreachable.
    """
    # A process that is killed in between leaves no half-deleted checkpoint, only files that the
    # next save into the same folder of checkpoints clears away.
    folder = path.resolve()
    if isinstance(folder, ObjectPath):
        (folder / MANIFEST).unlink()
        folder.remove()
        return
    going = folder.with_name(f".{folder.name}.{os.urandom(8).hex()}.tmp")
    folder.rename(going)
    shutil.rmtree(going)


def draft_name(owner: str) -> str:
    """Return a unique name for the files of one draft in an object store.

    Args:
        owner: Identifies the saver, normally a run's id. An owner saves one checkpoint at a time.
    """
    return f"{owner}-{os.urandom(8).hex()}"


def clear_left_overs(folder: ObjectPath, owner: str) -> None:
    """Delete the objects that no manifest names, if they are old or their owner left them.

    Raises CheckpointUnreachable.

    Args:
        folder: The folder of checkpoints.
        owner: The owner to clean up after, which must not be saving a checkpoint.
    """
    now = datetime.now(UTC)
    # By step folder and draft: the time at which its last file was put.
    drafts: dict[tuple[str, str], datetime] = {}
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
        # A manifest that cannot be read (None) may name any draft, so nothing beside it is deleted.
        if named is None or draft in named or not (draft.startswith(f"{owner}-") or now - put > LEFT_OVER_AFTER):
            continue
        # A draft "" stands for objects directly in the step's folder.
        if draft:
            (folder / step / draft).remove()
        elif step not in manifests:
            (folder / step).remove()
    # When a folder becomes empty, an object that stands for it may have been made. Delete that,
    # too.
    for step in steps - manifests:
        if not any((folder / step).objects()):
            (folder / step).remove()


def _drafts_of(checkpoint: ObjectPath) -> set[str] | None:
    """Return the names under which a checkpoint's files lie; None if its manifest is unreadable."""
    try:
        manifest = parse_json((checkpoint / MANIFEST).read_bytes())
        names = [str(file["name"]) for file in (*manifest["rows"], manifest["dense"])]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return {name.rpartition("/")[0] for name in names}


DISCARD_SECONDS = 5.0
"""How long a discard waits for the object store; the run's next save deletes what is left."""


def check_absent(folder: AnyFolder, step: int) -> None:
    """Raise CheckpointError if a folder of checkpoints already has one of this step."""
    path = folder / folder_of(step)
    # Publishing cannot replace a local folder, even one without a manifest. In an object store,
    # files without a manifest are left over from an earlier save and do not matter.
    if (path / MANIFEST).is_file() if isinstance(path, ObjectPath) else os.path.exists(path):
        raise CheckpointError(
            f"checkpoint {path}: exists already; delete it with `foreload checkpoint delete`, or choose another folder"
        )


def _failure(field: str, folder: AnyFolder, error: OSError) -> CheckpointError:
    """Return the CheckpointError for an OSError met while a draft was written."""
    if is_full(error):
        why = "the disk is full, and the unfinished checkpoint was deleted; free space, or choose another folder"
    else:
        why = f"{error.strerror or error}; make it writable, or choose another folder"
    return CheckpointError(f"{field}: cannot write to {folder}: {why}")


class Draft:
    """A draft in a local folder of checkpoints, which is created if it does not exist.

    The draft holds the folder's lock until it is published or discarded, so there is one at a time.

    Args:
        folder: The folder of checkpoints.
        field: The flag or field that named the folder, for messages.

    Attributes:
        path: The folder for the draft's files; several processes may write there.

    Raises:
        CheckpointError: The folder cannot be written to, or another checkpoint is being saved
            there.
    """

    def __init__(self, folder: Path, field: str) -> None:
        self.folder, self._field, self._held = folder, field, contextlib.ExitStack()
        self.path = folder / f".{folder_of('*').replace('*', 'draft')}.{os.urandom(8).hex()}.tmp"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._held.enter_context(holding(folder, field))
            # Delete what killed processes left. The lock ensures that no living one writes there.
            remove_unfinished(folder, folder_of("*"))
            self.path.mkdir()
        except OSError as error:
            self.discard()
            raise self.failure(error) from error

    def failure(self, error: OSError) -> CheckpointError:
        """Return the error to raise for an OSError met while the draft was written."""
        return _failure(self._field, self.folder, error)

    def publish(self, contents: Contents, on_manifest: Callable[[], object] = lambda: None) -> Checkpoint:
        """Write the manifest beside the other files, and rename the draft to its name, durably.

        Args:
            contents: The manifest. All files that it names are in `path`.
            on_manifest: Called after the manifest is written, before the rename.

        Raises:
            CheckpointError: The draft could not be published; nothing of it is left.
        """
        place = self.folder / folder_of(contents.step)
        try:
            check_absent(self.folder, contents.step)
            # The copy is for people: the manifest has the code, too.
            write_code(self.path / CODE, contents.run.code)
            contents.write(self.path)
            on_manifest()
            put_in_place(self.path, place, durable=True)
        except OSError as error:
            raise self.failure(error) from error
        finally:
            self.discard()
        return Checkpoint.open(place)

    def discard(self) -> None:
        """Release the lock, and delete what is not published.

        A further call deletes what was written since.
        """
        remove_path(self.path)
        self._held.close()


class ObjectDraft:
    """A draft in an object store, with the methods of `Draft`.

    Its files go to their final place, under a unique name. The arrival of the manifest turns them
    into a checkpoint. There is no lock: if another process publishes a checkpoint of the same step
    meanwhile, this one replaces it.

    Args:
        folder: The folder of checkpoints.
        field: The flag or field that named the folder, for messages.
        step: The last step trained.
        owner: Identifies the saver, normally a run's id. An owner saves one checkpoint at a time,
            so its files without a manifest are left over, and are deleted first.

    Attributes:
        path: Where the draft's files go.
    """

    def __init__(self, folder: ObjectPath, field: str, step: int, owner: str) -> None:
        self.folder, self._field = folder, field
        self._place, self._name = folder / folder_of(step), draft_name(owner)
        self.path = self._place / self._name
        self._may_be_published = False
        clear_left_overs(folder, owner)

    def failure(self, error: OSError) -> CheckpointError:
        """Return the error to raise for an OSError met while the draft was written."""
        return _failure(self._field, self.folder, error)

    def publish(self, contents: Contents, on_manifest: Callable[[], object] = lambda: None) -> Checkpoint:
        """Put the manifest into the object store, which makes the draft a checkpoint.

        Args:
            contents: The manifest, with the files' names in `path`.
            on_manifest: Called before the manifest is put.

        Raises:
            CheckpointError: The draft could not be published, and there is no checkpoint.
        """
        try:
            check_absent(self.folder, contents.step)
            self._check_there(holds(self.path, {file.name: file.bytes for file in (*contents.rows, contents.dense)}))
            on_manifest()
        except BaseException:
            self.discard()
            raise
        # From here on the files are deleted only together with the manifest: it may arrive although
        # the store reports that it did not.
        self._may_be_published = True
        rows = tuple(replace(file, name=f"{self._name}/{file.name}") for file in contents.rows)
        dense = replace(contents.dense, name=f"{self._name}/{contents.dense.name}")
        self._put(replace(contents, rows=rows, dense=dense))
        # A process that took the files for left over deleted them before it could see the manifest.
        # So look once more: any process that cleans up from now on does see it.
        try:
            checkpoint = Checkpoint.open(self._place)
        except CheckpointUnreachable:
            raise
        except CheckpointError:
            removed(self._place)
            raise
        # A manifest that names other files is that of another save of the same step, which counts.
        if checkpoint.contents.dense.name == dense.name and not checkpoint.files_there:
            removed(self._place)
            self._check_there(False)
        return checkpoint

    def _put(self, contents: Contents) -> None:
        """Put the manifest; return also if the answer was lost but the manifest has arrived."""
        try:
            contents.write(self._place)
        except CheckpointUnreachable as error:
            # Only the answer may have been lost: check whether the manifest exists.
            try:
                if Checkpoint.open(self._place).contents.dense.name == contents.dense.name:
                    return
            except CheckpointError:
                pass
            raise error

    def _check_there(self, there: bool) -> None:
        if not there:
            raise CheckpointError(
                f"{self._field}: {self._place}: part of it, or of its base, was deleted while it was being saved; save one checkpoint at a time there"
            )

    def discard(self) -> None:
        """Delete what is not published; wait for the object store for DISCARD_SECONDS at most."""
        if self._may_be_published:
            return

        def remove() -> None:
            with contextlib.suppress(CheckpointError):
                self.path.remove()

        removing = threading.Thread(target=remove, name="discard", daemon=True)
        removing.start()
        removing.join(DISCARD_SECONDS)


AnyDraft = Draft | ObjectDraft


def draft(folder: AnyFolder, field: str, step: int, owner: str) -> AnyDraft:
    """Begin the draft of a checkpoint in a folder of checkpoints. Raises CheckpointError.

    Args:
        folder: The folder of checkpoints, local or in an object store.
        field: The flag or field that named the folder, for messages.
        step: The last step trained.
        owner: As for an ObjectDraft.
    """
    return ObjectDraft(folder, field, step, owner) if isinstance(folder, ObjectPath) else Draft(folder, field)


def published(
    folder: AnyFolder, field: str, step: int, write: Callable[[AnyFolder], Contents], owner: str | None = None
) -> Checkpoint:
    """Write a checkpoint into a folder of checkpoints: complete and durable, or not at all.

    A local folder is created if it does not exist.

    Args:
        folder: The folder of checkpoints.
        field: The flag or field that named the folder, for messages.
        step: The last step trained.
        write: Called with a folder, into which it puts all files but the manifest. Returns the
            manifest.
        owner: As for an ObjectDraft. If None, this call alone is the owner.

    Raises:
        CheckpointError: The checkpoint cannot be written, or one of this step exists. An OSError of
            `write` becomes a CheckpointError; its other errors are raised as they are.
    """
    begun = draft(folder, field, step, owner or os.urandom(8).hex())
    try:
        check_absent(folder, step)
        return begun.publish(write(begun.path))
    except OSError as error:
        raise begun.failure(error) from error
    finally:
        begun.discard()
