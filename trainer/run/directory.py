"""The folder of a run: what was trained, how far it got, and the dense part of the model.

lock (empty; whoever uses the run holds it), manifest.json (what the run is), status.json (how far it is; written last, when rows and dense part
are where it says), dense-STEP.safetensors, placement.json (placement.saved.json: as it was when local stores saved last), metrics.jsonl,
events.jsonl, summary.json, report.html, tensorboard/, stores/ (rows of local stores),
write-back/ (with parity, each lane's last write-back batch), model/ (copies of the files of the user's model, as it was trained), kept/ (what its
model is read by, of the schedule), checkpoints/ (of `foreload checkpoint save`), drill.png (of `foreload drill`), control.sock while it
trains, token (by which other hosts join it, its owner's alone), scrub/ while that is scrubbed.

A folder with a lock or a manifest is a run's, one without a status is a run that never began to train: so whatever part of it was made, or deleted,
when its maker was killed, a new run may take its place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from foreload.base.codec import FormError, of_json, parse_json
from foreload.base.files import persist, remove_empty, remove_unfinished, replacing, write_json
from foreload.cache.client.local import LocalStores
from foreload.cache.parity.placement import Placement
from foreload.trainer.errors import CheckpointError, RunError, RunRefused
from foreload.trainer.run.manifest import VERSION, Manifest, Status, code_sums, write_code
from foreload.trainer.storage import AnyFolder, place

MANIFEST, STATUS, PLACEMENT, SAVED_PLACEMENT = "manifest.json", "status.json", "placement.json", "placement.saved.json"
METRICS, SUMMARY, TENSORBOARD, STORES, CONTROL = "metrics.jsonl", "summary.json", "tensorboard", "stores", "control.sock"
EVENTS, TOKEN, REPORT = "events.jsonl", "token", "report.html"
LOG, DRILL, SCRUB, KEPT, CHECKPOINTS, LOCK = "write-back", "drill.png", "scrub", "kept", "checkpoints", "lock"
CODE = "model"
KEPT_LANES = f"{KEPT}/lanes/lanes.json"
# In the order in which they are deleted: what has no status never began.
_FILES = (
    STATUS,
    CHECKPOINTS,
    KEPT,
    MANIFEST,
    PLACEMENT,
    SAVED_PLACEMENT,
    METRICS,
    EVENTS,
    SUMMARY,
    REPORT,
    TENSORBOARD,
    STORES,
    CONTROL,
    LOG,
    DRILL,
    SCRUB,
    CODE,
    TOKEN,
    LOCK,
)

_DENSE = re.compile(r"dense--?\d+\.safetensors")
_Kind = TypeVar("_Kind", Manifest, Status)
_REMEDY = "restore the folder from a copy, or delete the run with --overwrite and train anew"


@contextlib.contextmanager
def locked(path: Path, alone: bool = True) -> Iterator[int | None]:
    """Hold the run in a folder, which is made if it is not there; gives the lock's descriptor, which child processes may hold on to.

    alone: nobody else may hold it; otherwise others may read the run, too, and one that cannot be written to is read without a lock (None), as
    is one on a file system that has none. Raises RunError where somebody else holds it, and where the folder cannot be written to.
    """
    descriptor: int | None = None
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        assert descriptor is not None
        os.close(descriptor)
        raise RunError(
            f"run {path}: is being trained or read right now, or its trainers are still about to stop; stop that with Ctrl-C first, or "
            "choose another folder"
        ) from error
    except OSError as error:
        if descriptor is None and alone:
            raise _cannot_write(path, error) from error
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EROFS, errno.EACCES):
            raise
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _cannot_write(path: Path | str, error: OSError) -> RunError:
    return RunError(f"--run: cannot write to {path}: {error.strerror}; free the disk, make it writable, or choose another folder")


def _is_temporary(name: str) -> bool:
    """Whether a file is what `replacing` began to write for a run, and was killed in."""
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.tmp", name)
    return match is not None and (match[1] in _FILES or _DENSE.fullmatch(match[1]) is not None)


class Run:
    """A run's folder. lock: the descriptor of its lock, where this process holds it."""

    def __init__(self, path: Path | str, lock: int | None = None) -> None:
        self.path = Path(path)
        self.lock = lock

    @classmethod
    def create(cls, path: Path | str, manifest: Manifest, placement: Placement, overwrite: bool, lock: int | None = None) -> Run:
        """Make the folder of a new run, whose lock is held. Raises RunError if it holds anything already, unless overwrite and it is a run's.

        Where a run was made before and never began to train, the new one has its id, for so it may have claimed its namespace.
        """
        run = cls(path, lock)
        check_free(run.path, overwrite)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            if (run.path / MANIFEST).exists() and not (run.path / STATUS).exists():
                with contextlib.suppress(RunError):
                    manifest = replace(manifest, run_id=run.manifest.run_id)
            run._empty()
            placement.save(run.path / PLACEMENT)
            run.write_manifest(manifest)
        except OSError as error:
            raise _cannot_write(path, error) from error
        return run

    @classmethod
    def open(cls, path: Path | str, lock: int | None = None) -> Run:
        """The run in an existing folder. Raises RunError if there is none."""
        run = cls(path, lock)
        if not (run.path / MANIFEST).exists():
            raise RunError(f"run {path}: has no {MANIFEST}, so it is no run; give the folder that `foreload train --run` wrote")
        return run

    def _empty(self) -> None:
        stores = LocalStores.find(self.path / STORES)
        if stores is not None:
            stores.stop(save=False)
        left = [item.name for item in self.path.iterdir() if _is_temporary(item.name) or _DENSE.fullmatch(item.name)]
        for name in (*_FILES, *left):
            target = self.path / name
            # Whoever comes next waits at the same file.
            if name == LOCK:
                continue
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    def delete(self) -> None:
        """Delete everything of the run, whose lock is held, in the folder, which goes too if that was all, and end its local stores."""
        self._empty()
        (self.path / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            remove_empty(self.path)

    @property
    def manifest(self) -> Manifest:
        """What the run is; RunError if the file is damaged or of another version."""
        stored = {"store_urls": []} | self._read(MANIFEST)
        if stored.get("version") != VERSION:
            raise RunRefused(
                f"run {self.path}: its version must be {VERSION}; got {stored.get('version')!r}; use the program that wrote it"
            )
        return self._parsed(MANIFEST, stored, Manifest)

    def write_manifest(self, manifest: Manifest) -> None:
        """Publish the manifest, whole and on the disk; before it, a copy of the model's code that it names."""
        if manifest.code and not (copy := self.code_copy(manifest)).exists():
            copy.parent.mkdir(exist_ok=True)
            with replacing(copy) as folder:
                write_code(folder, manifest.code)
        write_json(self.path / MANIFEST, manifest, durable=True)

    def code_copy(self, manifest: Manifest) -> Path:
        """Where the copy of the model's code is that a manifest names; those of code that the run was trained with before are beside it."""
        return self.path / CODE / hashlib.sha256(json.dumps(code_sums(manifest.code)).encode()).hexdigest()[:12]

    @property
    def status(self) -> Status | None:
        """How far the run is; None if it never began to train."""
        if not (self.path / STATUS).exists():
            return None
        status = self._parsed(STATUS, self._read(STATUS), Status)
        if status.batches and status.batches.keys() != {str(lane) for lane in range(self.manifest.lanes)}:
            raise self._damaged(STATUS, "batches: must have each lane of the run")
        return status

    def write_status(self, status: Status) -> None:
        """Publish how far the run is, whole and on the disk: to be called when the rows and the dense part are there."""
        write_json(self.path / STATUS, status, durable=True)
        if status.state != "training":
            self.forget_saved_placement()

    @property
    def term(self) -> int:
        """The highest term in which this folder owned the run's lanes. It is on disk before it is on a server; the first one is 1."""
        status = self.status
        return 1 if status is None else status.term

    def raise_term(self, term: int) -> None:
        """Note that lanes are owned in a term from now on. Raises RunError where a higher one was noted, OSError."""
        status = self.status
        assert status is not None
        if term < status.term:
            raise RunError(
                f"run {self.path}: its term is {status.term} already, so {term} must not be; is the run trained twice?"
            )
        self.write_status(replace(status, term=term))

    def come_to_rest(self, manifest: Manifest, status: Status) -> None:
        """Publish what the run is by now, then how far it is; waits for as long as the disk is full. What killed processes began to write goes."""
        persist(self.path / MANIFEST, lambda: self.write_manifest(manifest))
        persist(self.path / STATUS, lambda: self.write_status(status))
        for other in self._dense_parts() - {self.dense(status.step)}:
            other.unlink(missing_ok=True)
        remove_unfinished(self.path)

    def dense(self, step: int) -> Path:
        """Where the dense part after a step is, or is to be. That of the last clean stop stays until the status names another step."""
        return self.path / f"dense-{step}.safetensors"

    def _dense_parts(self) -> set[Path]:
        return {path for path in self.path.iterdir() if _DENSE.fullmatch(path.name)}

    def saved_status(self) -> Status:
        """The status of the run's last clean stop. Raises RunError where it never began to train, and where its servers lack rows that it keeps.

        Its state is "training" where trainers died since: whether the rows are still of that stop, `check_rows` knows.
        """
        status = self.status
        if status is None:
            raise RunError(f"run {self.path}: never began to train, so there is no model; train it, without --resume")
        if self.keeps_lanes:
            raise RunError(
                f"run {self.path}: ended while its servers lacked rows, which it keeps in {self.path / KEPT}; foreload train --run {self.path} "
                "--resume brings them there, and goes on"
            )
        return status

    @property
    def keeps_lanes(self) -> bool:
        """Whether it keeps rows that its servers lack, so that nothing can be done with it before they have them (`kept_lanes`)."""
        if not (self.path / KEPT_LANES).exists():
            return False
        status = self.status
        return status is not None and status.state == "training"  # else they are there, and who brought them was killed just then

    def checkpoint_folders(self, named: str | None = None) -> list[AnyFolder]:
        """Where checkpoints of the run may be: in a folder that a call names, where the last one saved them, in its own folder. Raises RunError."""
        folders = [place(given) for given in (named, self.manifest.training_job.checkpoint) if given is not None]
        return list({str(path.absolute()): path for path in [*folders, self.path / CHECKPOINTS]}.values())  # each once

    def newest_checkpoint(self, folder: str | None = None, after: int = -1) -> AnyFolder | None:
        """The run's of the latest step in its folders of checkpoints, whatever it holds; None if none is later than `after`. folder: `named`."""
        there: list[AnyFolder] = []
        for checkpoints in self.checkpoint_folders(folder):
            # What else is to be reported must not fail for this.
            with contextlib.suppress(OSError, CheckpointError):
                there += checkpoints.iterdir()
        steps = [(int(match[1]), path) for path in there if (match := re.fullmatch(r"step-(\d+)", path.name)) and self._has(path)]
        step, newest = max(steps, key=itemgetter(0), default=(-1, None))
        return newest if step > after else None

    def _has(self, checkpoint: AnyFolder) -> bool:
        """Whether a checkpoint, where others may have some, too, is of this run, or is damaged, and so may be."""
        manifest = checkpoint / "checkpoint.json"
        try:
            run_id = parse_json(manifest.read_bytes())["run"]["run_id"]
        except FileNotFoundError:
            return False
        except (OSError, CheckpointError, ValueError, KeyError, TypeError):
            return True
        return bool(run_id == self.manifest.run_id)

    @property
    def placement(self) -> Placement:
        """Where the run's rows live. Of a run that was broken off, and whose local servers are gone: where those are that these saved."""
        return Placement.load(self.path / (SAVED_PLACEMENT if self._goes_back else PLACEMENT))

    def write_placement(self, placement: Placement) -> None:
        """Publish where rows live, or move to, from now on, whole and on the disk."""
        saved, status = self.path / SAVED_PLACEMENT, self.status
        trains = status is not None and status.state == "training"
        if trains and self.manifest.local_stores is not None and not saved.exists():
            # Should this call be broken off, the next one begins with what local stores have saved.
            self.placement.save(saved)
        placement.save(self.path / PLACEMENT)
        if not trains:
            self.forget_saved_placement()

    def forget_saved_placement(self) -> None:
        """What local stores save from now on is as the placement is now."""
        (self.path / SAVED_PLACEMENT).unlink(missing_ok=True)

    @property
    def _goes_back(self) -> bool:
        """Whether what local stores saved is what the run has, and groups have moved since."""
        if not (self.path / SAVED_PLACEMENT).exists() or (status := self.status) is None or status.state != "training":
            return False
        local = LocalStores.find(self.path / STORES)
        return local is None or not any(local.pids)

    def go_back(self) -> None:
        """Before local stores are started: the placement is the one that goes with what they begin with."""
        if self._goes_back:
            self.placement.save(self.path / PLACEMENT)
            self.forget_saved_placement()

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return of_json(parse_json((self.path / name).read_bytes()), dict[str, Any])
        except (OSError, ValueError) as error:
            raise RunError(f"run {self.path}: cannot read {name} ({error}); {_REMEDY}") from error

    def _parsed(self, name: str, stored: dict[str, Any], kind: type[_Kind]) -> _Kind:
        try:
            return of_json(stored, kind)
        except FormError as error:
            raise self._damaged(name, str(error)) from error

    def _damaged(self, name: str, why: str) -> RunRefused:
        return RunRefused(f"run {self.path}: {name} is damaged ({why}); {_REMEDY}")


def check_free(path: Path, overwrite: bool) -> None:
    """Raise RunError if a new run cannot be put there."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RunRefused(f"--run: {path} is a file; choose a folder")
    held = {item.name for item in path.iterdir() if not _is_temporary(item.name)}
    foreign = sorted(name for name in held - set(_FILES) if not _DENSE.fullmatch(name))
    if foreign and not held & {MANIFEST, LOCK}:
        raise RunRefused(f"--run: {path} holds other files, such as {foreign[0]}; choose a new folder")
    # Without a status it never began to train, and there is nothing to lose.
    if STATUS in held and not overwrite:
        raise RunError(
            f"--run: {path} holds a run already; give --resume to go on with it, --overwrite to delete it, or another folder"
        )
    # Nor is there here, but for what outlives a run that is deleted.
    if CHECKPOINTS in held and not overwrite:
        raise RunRefused(f"--run: {path} holds checkpoints; give --overwrite to delete them, or another folder")
