"""A checkpoint that is being written, locally or to an object store: nobody sees it until it is published, and then it is whole."""

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


DISCARD_SECONDS = 5.0
"""How long is waited for an object store to delete what is given up; the next checkpoint of the run deletes it, too."""


def check_absent(folder: AnyFolder, step: int) -> None:
    """Raise CheckpointError where a checkpoint of this step cannot be saved in a folder of checkpoints, since there is one."""
    path = folder / folder_of(step)
    # A folder without a manifest cannot be replaced, but what lies so in an object store is left over.
    if (path / MANIFEST).is_file() if isinstance(path, ObjectPath) else os.path.exists(path):
        raise CheckpointError(
            f"checkpoint {path}: exists already; delete it with `foreload checkpoint delete`, or choose another folder"
        )


def _failure(field: str, folder: AnyFolder, error: OSError) -> CheckpointError:
    """The error to raise for one met while a draft was written."""
    if is_full(error):
        why = "the disk is full, and nothing of the checkpoint is left there; free space, or choose another folder"
    else:
        why = f"{error.strerror or error}; make it writable, or choose another folder"
    return CheckpointError(f"{field}: cannot write to {folder}: {why}")


class Draft:
    """Beside the checkpoints in a local folder, which is made if it is not there. One is written there at a time: a lock is held until it is over.

    field: what named the folder, in messages. path: of the folder in which its files are put, by several processes if need be. Raises
    CheckpointError where it cannot be written.
    """

    def __init__(self, folder: Path, field: str) -> None:
        self.folder, self._field, self._held = folder, field, contextlib.ExitStack()
        self.path = folder / f".{folder_of('*').replace('*', 'draft')}.{os.urandom(8).hex()}.tmp"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._held.enter_context(holding(folder, field))
            # Of whoever was killed.
            remove_unfinished(folder, folder_of("*"))
            self.path.mkdir()
        except OSError as error:
            self.discard()
            raise self.failure(error) from error

    def failure(self, error: OSError) -> CheckpointError:
        """The error to raise for one met while it was written."""
        return _failure(self._field, self.folder, error)

    def publish(self, contents: Contents, on_manifest: Callable[[], object] = lambda: None) -> Checkpoint:
        """Put the manifest beside the other files, which are all there, and give it its name, on the disk. on_manifest: called between the two.

        Raises CheckpointError, after which there is nothing of it.
        """
        place = self.folder / folder_of(contents.step)
        try:
            check_absent(self.folder, contents.step)
            # For people: the manifest has it, too.
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
        """Leave nothing of what is not published; called again, nothing of what was written since."""
        remove_path(self.path)
        self._held.close()


class ObjectDraft:
    """In an object store, as a `Draft`: its files lie where they stay, under a name of their own, and are a checkpoint's once its manifest comes.

    owner: who saves no other one meanwhile, whatever of whose has no manifest being left over. Nobody else is held off: a checkpoint of the same step
    that another one publishes meanwhile is replaced.
    """

    def __init__(self, folder: ObjectPath, field: str, step: int, owner: str) -> None:
        self.folder, self._field = folder, field
        self._place, self._name = folder / folder_of(step), draft_name(owner)
        self.path = self._place / self._name
        self._may_be_published = False
        clear_left_overs(folder, owner)

    def failure(self, error: OSError) -> CheckpointError:
        """The error to raise for one met while it was written."""
        return _failure(self._field, self.folder, error)

    def publish(self, contents: Contents, on_manifest: Callable[[], object] = lambda: None) -> Checkpoint:
        """Put the manifest there, by whose arrival it is a checkpoint. on_manifest: called before. Raises CheckpointError: there is none then."""
        try:
            check_absent(self.folder, contents.step)
            self._check_there(holds(self.path, {file.name: file.bytes for file in (*contents.rows, contents.dense)}))
            on_manifest()
        except BaseException:
            self.discard()
            raise
        # From here on nobody deletes its files but with the manifest: that may arrive although it is said not to have.
        self._may_be_published = True
        rows = tuple(replace(file, name=f"{self._name}/{file.name}") for file in contents.rows)
        dense = replace(contents.dense, name=f"{self._name}/{contents.dense.name}")
        self._put(replace(contents, rows=rows, dense=dense))
        # Whoever deleted something of it meanwhile has seen no manifest then; who does so from now on, sees it.
        try:
            checkpoint = Checkpoint.open(self._place)
        except CheckpointUnreachable:
            raise
        except CheckpointError:
            removed(self._place)
            raise
        if checkpoint.contents.dense.name == dense.name and not checkpoint.files_there:
            removed(self._place)
            self._check_there(False)
        return checkpoint

    def _put(self, contents: Contents) -> None:
        try:
            contents.write(self._place)
        except CheckpointUnreachable as error:
            # It may have arrived, and only the answer not.
            try:
                if Checkpoint.open(self._place).contents.dense.name == contents.dense.name:
                    return
            except CheckpointError:
                pass
            raise error

    def _check_there(self, there: bool) -> None:
        if not there:
            raise CheckpointError(
                f"{self._field}: {self._place}: something of it, or of its base, was deleted while it was saved; save one at a time there"
            )

    def discard(self) -> None:
        """As a Draft does, as far as the object store does that soon."""
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
    """The draft of a checkpoint of a step, in a folder of checkpoints. owner: as for an ObjectDraft. Raises CheckpointError."""
    return ObjectDraft(folder, field, step, owner) if isinstance(folder, ObjectPath) else Draft(folder, field)


def published(
    folder: AnyFolder, field: str, step: int, write: Callable[[AnyFolder], Contents], owner: str | None = None
) -> Checkpoint:
    """A checkpoint of a step in a folder of checkpoints, which is made if it is not there: whole, on the disk, or not at all.

    field, owner: as for a Draft; None: this call alone. write: puts all files but the manifest into the folder that it is given, and returns what the
    manifest is to say. Raises CheckpointError, and what `write` raises but OSError.
    """
    begun = draft(folder, field, step, owner or os.urandom(8).hex())
    try:
        check_absent(folder, step)
        return begun.publish(write(begun.path))
    except OSError as error:
        raise begun.failure(error) from error
    finally:
        begun.discard()
