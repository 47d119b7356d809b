"""The folder of a run: what was trained, how far training got, and the model's dense part.

The folder holds:

- lock: an empty file; a process that uses the run holds a lock on it.
- manifest.json: what the run is.
- status.json: how far the run is. It is written last, once the rows and the dense part are saved.
- dense-STEP.safetensors: the dense part of the model after a step.
- placement.json: the store shard of each stripe. placement.saved.json: the placement at the time
  when local stores last saved their rows.
- metrics.jsonl, events.jsonl, summary.json, report.html, tensorboard/: reports.
- stores/: the rows of local stores.
- write-back/: with parity, each lane's last write-back batch.
- model/: copies of the files of the user's model, as they were when it was trained.
- kept/: the parts of the schedule that are needed to read the model, and rows that the servers
  lack.
- checkpoints/: written by `foreload checkpoint save`.
- drill.png: written by `foreload drill`.
- control.sock: exists while the run trains.
- token: lets trainers on other hosts join the run; only its owner can read it.
- scrub/: exists while the run is scrubbed.

A folder with a lock or a manifest is a run's folder. A run without a status never began to train.
So if a process is killed while it creates or deletes a run, a new run may take the folder, whatever
files are left in it.
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

from foreload.base.codec import FormError, fault, of_json, parse_json
from foreload.base.files import persist, remove_empty, remove_unfinished, replacing, write_json
from foreload.cache.client.local import LocalStores
from foreload.cache.parity.placement import Placement
from foreload.trainer.errors import CheckpointError, RunError, RunRefused
from foreload.trainer.run.manifest import VERSION, Manifest, Status, code_sums, write_code
from foreload.trainer.storage import AnyFolder, place

MANIFEST, STATUS, PLACEMENT, SAVED_PLACEMENT = "manifest.json", "status.json", "placement.json", "placement.saved.json"
METRICS, SUMMARY, TENSORBOARD, STORES, CONTROL = "metrics.jsonl", "summary.json", "tensorboard", "stores", "control.sock"
EVENTS, TOKEN, REPORT = "events.jsonl", "token", "report.html"
ENGINE, PASSWORD, GIVEN_UP = "engine.json", "store-password", "given-up.log"
LOG, DRILL, SCRUB, KEPT, CHECKPOINTS, LOCK = "write-back", "drill.png", "scrub", "kept", "checkpoints", "lock"
CODE = "model"
KEPT_LANES = f"{KEPT}/lanes/lanes.json"
# These files are deleted in this order. The status goes first: a run without it never began to
# train.
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
    PASSWORD,
    ENGINE,
    GIVEN_UP,
    LOCK,
)

_DENSE = re.compile(r"dense--?\d+\.safetensors")
_Kind = TypeVar("_Kind", Manifest, Status)
_REMEDY = "restore the folder from a copy, or delete the run with --overwrite and train anew"


@contextlib.contextmanager
def locked(path: Path, alone: bool = True) -> Iterator[int | None]:
    """Lock the run in a folder, which is created if needed, and yield the lock's descriptor.

    Child processes may inherit the descriptor and so keep the lock.

    Args:
        path: the run's folder.
        alone: if True, no other process may hold the lock. If False, other processes may read the
            run at the same time; a folder that cannot be written to, or is on a file system without
            locks, is then read without a lock, and None is yielded.

    Raises:
        RunError: another process holds the lock, or the folder cannot be written to.
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
            f"run {path}: is being trained or read right now, or its trainers are still stopping; stop it with Ctrl-C first, or "
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
    """Return whether a file is a run's temporary file of `replacing`, left by a killed process."""
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.tmp", name)
    return match is not None and (match[1] in _FILES or _DENSE.fullmatch(match[1]) is not None)


class Run:
    """A run's folder.

    Attributes:
        lock: the descriptor of the run's lock, if this process holds it.
    """

    def __init__(self, path: Path | str, lock: int | None = None) -> None:
        self.path = Path(path)
        self.lock = lock

    @classmethod
    def create(cls, path: Path | str, manifest: Manifest, placement: Placement, overwrite: bool, lock: int | None = None) -> Run:
        """Create the folder of a new run, whose lock the caller holds.

        If the folder holds a run that never began to train, the new run keeps that run's id,
        because the earlier one may already have claimed its namespace on the servers.

        Args:
            overwrite: whether a run that the folder holds may be deleted.

        Raises:
            RunError: the folder is not empty (unless it holds a run and `overwrite` is set), or it
                cannot be written to.
        """
        run = cls(path, lock)
        check_free(run.path, overwrite)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            # A run that never began to train may have claimed its namespace under this id.
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
        """Return the run in an existing folder. Raises RunError if the folder holds no run."""
        run = cls(path, lock)
        if not (run.path / MANIFEST).exists():
            raise RunError(
                f"run {path}: has no {MANIFEST}, so it is not a run; give the folder that `foreload train --run` wrote"
            )
        return run

    def _empty(self) -> None:
        # Local servers of the run may still be running in the folder.
        # The servers must not write to files that are about to be deleted.
        stores = LocalStores.find(self.path / STORES)
        if stores is not None:
            stores.stop(save=False)
        left = [item.name for item in self.path.iterdir() if _is_temporary(item.name) or _DENSE.fullmatch(item.name)]
        for name in (*_FILES, *left):
            target = self.path / name
            # Other processes may wait for a lock on this very file, so it must stay.
            if name == LOCK:
                continue
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    def delete(self) -> None:
        """Delete all files of the run, whose lock the caller holds, and stop its local stores.

        The folder is deleted too if nothing else is in it.
        """
        self._empty()
        (self.path / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            remove_empty(self.path)

    @property
    def manifest(self) -> Manifest:
        """What the run is. Raises RunError if the file is damaged or of another version."""
        stored = {"store_urls": []} | self._read(MANIFEST)
        if stored.get("version") != VERSION:
            raise RunRefused(
                f"run {self.path}: its version must be {VERSION}; got {stored.get('version')!r}; use the program that wrote it"
            )
        return self._parsed(MANIFEST, stored, Manifest)

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest durably and atomically.

        A copy of the model's code that the manifest names is written first.
        """
        if manifest.code and not (copy := self.code_copy(manifest)).exists():
            copy.parent.mkdir(exist_ok=True)
            with replacing(copy) as folder:
                write_code(folder, manifest.code)
        write_json(self.path / MANIFEST, manifest, durable=True)

    def code_copy(self, manifest: Manifest) -> Path:
        """Return the path of the copy of the model's code that a manifest names.

        Copies of code that the run was trained with earlier are beside it.
        """
        return self.path / CODE / hashlib.sha256(json.dumps(code_sums(manifest.code)).encode()).hexdigest()[:12]

    @property
    def status(self) -> Status | None:
        """How far the run is, or None if it never began to train. Raises RunError."""
        if not (self.path / STATUS).exists():
            return None
        status = self._parsed(STATUS, self._read(STATUS), Status)
        if status.batches and status.batches.keys() != {str(lane) for lane in range(self.manifest.lanes)}:
            raise self._damaged(STATUS, "batches: must include every lane of the run")
        return status

    def write_status(self, status: Status) -> None:
        """Write how far the run is, durably and atomically.

        Call this only once the rows and the dense part of that state are saved.
        """
        write_json(self.path / STATUS, status, durable=True)
        if status.state != "training":
            self.forget_saved_placement()

    @property
    def term(self) -> int:
        """The highest term in which this folder owned the run's lanes; the first term is 1.

        A term is on disk before any server has it.
        """
        status = self.status
        return 1 if status is None else status.term

    def raise_term(self, term: int) -> None:
        """Record that lanes are owned in `term` from now on.

        Raises:
            RunError: a higher term is recorded already.
            OSError: the status cannot be written.
        """
        status = self.status
        assert status is not None
        if term < status.term:
            raise RunError(
                f"run {self.path}: its term is {status.term} already, so {term} cannot begin; is the run being trained twice?"
            )
        self.write_status(replace(status, term=term))

    def record_stop(self, manifest: Manifest, status: Status) -> None:
        """Write the manifest, then the status, of a run that has stopped training.

        While the disk is full, this waits until there is room. Then dense parts of other steps and
        temporary files of killed processes are deleted.
        """
        persist(self.path / MANIFEST, lambda: self.write_manifest(manifest))
        persist(self.path / STATUS, lambda: self.write_status(status))
        for other in self._dense_parts() - {self.dense(status.step)}:
            other.unlink(missing_ok=True)
        remove_unfinished(self.path)

    def dense(self, step: int) -> Path:
        """Return the path of the dense part after a step, whether or not it exists yet.

        The dense part of the last clean stop is kept until the status names another step.
        """
        return self.path / f"dense-{step}.safetensors"

    def _dense_parts(self) -> set[Path]:
        return {path for path in self.path.iterdir() if _DENSE.fullmatch(path.name)}

    def saved_status(self) -> Status:
        """Return the status of the run's last clean stop.

        Its state is "training" if trainers died after that stop. `check_rows` finds out whether the
        rows on the servers are still those of the stop.

        Raises:
            RunError: the run never began to train, or its servers lack rows that its folder keeps.
        """
        status = self.status
        if status is None:
            raise RunError(f"run {self.path}: never began to train, so there is no model; train it, without --resume")
        if self.keeps_lanes:
            raise RunError(
                f"run {self.path}: ended while its servers lacked rows; it keeps these in {self.path / KEPT}; foreload train --run {self.path} "
                "--resume writes them to the servers, and goes on"
            )
        return status

    @property
    def keeps_lanes(self) -> bool:
        """Whether the run's folder keeps rows that its servers lack (`kept_lanes`).

        If so, nothing else can be done with the run before those rows are on the servers.
        """
        if not (self.path / KEPT_LANES).exists():
            return False
        status = self.status
        # In any other state the servers have the rows: a process brought them there, and was killed
        # before it could delete the files.
        return status is not None and status.state == "training"

    def checkpoint_folders(self, named: str | None = None) -> list[AnyFolder]:
        """Return the folders that may hold checkpoints of the run, each once.

        These are the folder `named` by the caller, if any, then the folder in which the last call
        saved checkpoints, then the one in the run's own folder. Raises RunError.
        """
        folders = [place(given) for given in (named, self.manifest.training_job.checkpoint) if given is not None]
        # The dictionary removes folders that are named twice.
        return list({str(path.absolute()): path for path in [*folders, self.path / CHECKPOINTS]}.values())

    def newest_checkpoint(self, folder: str | None = None, after: int = -1) -> AnyFolder | None:
        """Return the run's checkpoint of the latest step, complete or not.

        Args:
            folder: a further folder to search, as in `checkpoint_folders`.
            after: only checkpoints of later steps count.

        Returns:
            The checkpoint's folder, or None if no checkpoint is later than `after`.
        """
        there: list[AnyFolder] = []
        for checkpoints in self.checkpoint_folders(folder):
            # A folder that cannot be listed must not keep the caller from its own report.
            with contextlib.suppress(OSError, CheckpointError):
                there += checkpoints.iterdir()
        steps = [(int(match[1]), path) for path in there if (match := re.fullmatch(r"step-(\d+)", path.name)) and self._has(path)]
        step, newest = max(steps, key=itemgetter(0), default=(-1, None))
        return newest if step > after else None

    def _has(self, checkpoint: AnyFolder) -> bool:
        """Return whether a checkpoint is this run's, or is damaged and so may be this run's.

        Other runs may save checkpoints in the same folder.
        """
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
        """Where the run's rows are stored.

        If the run's last call was interrupted and none of its local servers runs, this is the
        placement of the rows that those servers saved.
        """
        return Placement.load(self.path / (SAVED_PLACEMENT if self._goes_back else PLACEMENT))

    def write_placement(self, placement: Placement) -> None:
        """Write, durably and atomically, where rows are stored or migrate to from now on."""
        saved, status = self.path / SAVED_PLACEMENT, self.status
        trains = status is not None and status.state == "training"
        if trains and self.manifest.local_stores is not None and not saved.exists():
            # If this call is interrupted, the next one starts from the rows that local stores have
            # saved.
            self.placement.save(saved)
        placement.save(self.path / PLACEMENT)
        if not trains:
            self.forget_saved_placement()

    def forget_saved_placement(self) -> None:
        """Delete the saved placement.

        Call this when what local stores save matches the current placement.
        """
        (self.path / SAVED_PLACEMENT).unlink(missing_ok=True)

    @property
    def _goes_back(self) -> bool:
        """Whether local stores will start from rows saved under an earlier placement.

        That is so if the run's last call was interrupted after a migration began and none of its
        local servers runs.
        """
        if not (self.path / SAVED_PLACEMENT).exists() or (status := self.status) is None or status.state != "training":
            return False
        local = LocalStores.find(self.path / STORES)
        return local is None or not any(local.pids)

    def go_back(self) -> None:
        """Restore the placement that belongs to the rows that local stores will load.

        Call this before the local stores are started.
        """
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
            raise self._damaged(name, error) from error

    def _damaged(self, name: str, why: Exception | str) -> RunRefused:
        return RunRefused(fault(f"run {self.path}: {name}", why, _REMEDY))


def check_free(path: Path, overwrite: bool) -> None:
    """Raise RunError if a new run cannot be created in a folder.

    Args:
        path: the folder, which need not exist.
        overwrite: whether a run in it may be deleted, with its checkpoints.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise RunRefused(f"--run: {path} is a file; choose a folder")
    held = {item.name for item in path.iterdir() if not _is_temporary(item.name)}
    foreign = sorted(name for name in held - set(_FILES) if not _DENSE.fullmatch(name))
    if foreign and not held & {MANIFEST, LOCK}:
        raise RunRefused(f"--run: {path} holds other files, such as {foreign[0]}; choose a new folder")
    # A run without a status never began to train, so nothing of value is lost.
    if STATUS in held and not overwrite:
        raise RunError(
            f"--run: {path} holds a run already; give --resume to go on with it, --overwrite to delete it, or another folder"
        )
    # A run without a status never began to train, so nothing of value is lost.
    if CHECKPOINTS in held and not overwrite:
        raise RunRefused(f"--run: {path} holds checkpoints; give --overwrite to delete them, or another folder")
