"""The folder of a run: what was trained, how far it got, and the dense part of the model.

lock (empty; whoever uses the run holds it), manifest.json (what the run is), status.json (how far it is; written last, when rows and dense part
are where it says), dense.safetensors, placement.json, metrics.jsonl, summary.json, tensorboard/, stores/ (rows of local stores), write-back/ (with
parity, each lane's last write-back batch), kept/ (what its model is read by, of the schedule), drill.png (of `foreload drill`),
control.sock while it trains, scrub/ while that is scrubbed.

A folder with a lock or a manifest is a run's, one without a status is a run that never began to train: so whatever part of it was made, or deleted,
when its maker was killed, a new run may take its place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.errors import CacheError
from foreload.cache.parity.placement import Placement
from foreload.cache.protocol.ownership import stale_shards
from foreload.pipelines.base.files import persist, write_json
from foreload.pipelines.base.settings import settings_of
from foreload.pipelines.errors import SettingError
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.errors import RunError
from foreload.trainer.run.job import TrainJob

VERSION = 1
MANIFEST, STATUS, PLACEMENT, DENSE = "manifest.json", "status.json", "placement.json", "dense.safetensors"
METRICS, SUMMARY, TENSORBOARD, STORES, CONTROL = "metrics.jsonl", "summary.json", "tensorboard", "stores", "control.sock"
LOG, DRILL, SCRUB, KEPT, LOCK = "write-back", "drill.png", "scrub", "kept", "lock"
# In the order in which they are deleted: what has no status never began.
_FILES = (STATUS, KEPT, MANIFEST, PLACEMENT, DENSE, METRICS, SUMMARY, TENSORBOARD, STORES, CONTROL, LOG, DRILL, SCRUB, LOCK)

_TAIL_BYTES = 1 << 16

State = Literal["training", "stopped", "ended"]

# Settings that the trained model does not depend on: a run may go on with other ones.
FREE_SETTINGS = (
    "schedule",
    "run",
    "model_folder",
    "store",
    "parity",  # what RUN's placement has, in any case
    "trainers",
    "memory",
    "namespace",
    "store_timeout",
    "peer_timeout",
    "address",
)

# Settings of the numerics fingerprint: a run may go on with other ones where that is accepted.
NUMERICS_SETTINGS = ("threads", "cpu_capability", "device")


@dataclass(frozen=True, slots=True)
class Stage:
    """A schedule that the run trained or trains on.

    identity: SHA-256 of its header; checksum: of its schedule.json, None while that is being prepared; end_step: the step after its last. segments:
    how many were begun; prefix: what these are told by (Schedule.prefix).
    """

    path: str
    identity: str
    checksum: str | None
    first_step: int
    end_step: int
    segments: int = 0
    prefix: str = ""

    @classmethod
    def of(cls, schedule: Schedule) -> Stage:
        """The stage of a schedule as it is now."""
        checksum = schedule.checksum if schedule.complete else None
        header = schedule.header
        return cls(str(schedule.path.absolute()), schedule.identity, checksum, header.first_step, header.end_step)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run is. store_urls carry no passwords and are empty for local stores; local_stores: how many, or None.

    fingerprint: of the numerics it was trained under last. mixed_numerics: where it went on under another one, {"step", "fingerprint"} of each
    in order, step the first under it; else empty.
    """

    run_id: str
    job: dict[str, Any]
    namespace: str
    lanes: int
    store_urls: tuple[str, ...]
    local_stores: int | None
    stages: tuple[Stage, ...]
    fingerprint: dict[str, Any] | None = None
    mixed_numerics: tuple[dict[str, Any], ...] = ()
    version: int = VERSION

    @property
    def identity(self) -> dict[str, Any]:
        """Whose the namespace on the store is."""
        return {"run": self.run_id, "lanes": self.lanes}

    def under(self, fingerprint: dict[str, Any], step: int) -> Manifest:
        """This run as it goes on under a fingerprint with the training step given."""
        if self.fingerprint is None or self.fingerprint == fingerprint:
            return replace(self, fingerprint=fingerprint)
        before = self.mixed_numerics or ({"step": self.stages[0].first_step, "fingerprint": self.fingerprint},)
        # Under one that was accepted before the same step, nothing was trained.
        kept = [one for one in before if one["step"] < step]
        if not kept or kept[-1]["fingerprint"] != fingerprint:
            kept.append({"step": step, "fingerprint": fingerprint})
        return replace(self, fingerprint=fingerprint, mixed_numerics=tuple(kept) if len(kept) > 1 else ())

    @property
    def training_job(self) -> TrainJob:
        """The job as it was started."""
        return TrainJob.of(self.job)


@dataclass(frozen=True, slots=True)
class Status:
    """How far a run is: step, the last one trained (first_step - 1: none); batches: per lane, the number of its last write-back batch.

    totals: what the metrics so far add up to. While state is "training", and where trainers died in it, the others say where this call began: at
    the last clean stop, of which the dense part is. lost: store shards whose rows only their stripes give.
    """

    state: State
    step: int
    batches: dict[str, int] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)


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
    found = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.tmp", name)
    return found is not None and found[1] in _FILES


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
        left = [item.name for item in self.path.iterdir() if _is_temporary(item.name)]
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
            self.path.rmdir()

    @property
    def manifest(self) -> Manifest:
        """What the run is; RunError if the file is damaged or of another version."""
        stored = self._read(MANIFEST)
        if stored.get("version") != VERSION:
            raise RunError(
                f"run {self.path}: its version must be {VERSION}; got {stored.get('version')!r}; use the program that wrote it"
            )
        try:
            stages = tuple(Stage(**stage) for stage in stored["stages"])
            listed = {name: tuple(stored.get(name, ())) for name in ("store_urls", "mixed_numerics")}
            return Manifest(**{**stored, **listed, "stages": stages})
        except (TypeError, KeyError) as error:
            raise RunError(
                f"run {self.path}: {MANIFEST} is damaged ({error}); restore the folder from a copy, or delete the run with --overwrite and train anew"
            ) from error

    def write_manifest(self, manifest: Manifest) -> None:
        """Publish the manifest, whole."""
        write_json(self.path / MANIFEST, asdict(manifest))

    @property
    def status(self) -> Status | None:
        """How far the run is; None if it never began to train."""
        if not (self.path / STATUS).exists():
            return None
        try:
            return Status(**self._read(STATUS))
        except TypeError as error:
            raise RunError(
                f"run {self.path}: {STATUS} is damaged ({error}); restore the folder from a copy, or delete the run with --overwrite and train anew"
            ) from error

    def write_status(self, status: Status) -> None:
        """Publish how far the run is: to be called when the rows and the dense part are there."""
        write_json(self.path / STATUS, asdict(status))

    def come_to_rest(self, manifest: Manifest, status: Status) -> None:
        """Publish how far the run is, and what it is by now, however long the disk is full."""
        persist(self.path / MANIFEST, lambda: self.write_manifest(manifest))
        persist(self.path / STATUS, lambda: self.write_status(status))

    def saved_status(self) -> Status:
        """The status of the run's last clean stop. Raises RunError where it never began to train.

        Its state is "training" where trainers died since: whether the rows are still of that stop, `check_rows` knows.
        """
        status = self.status
        if status is None:
            raise RunError(f"run {self.path}: never began to train, so there is no model; train it, without --resume")
        return status

    def check_rows(self, store: Store, status: Status) -> None:
        """Raise RunError unless the rows on an open store are those of the last clean stop, wherever trainers died since.

        They are where no trainer wrote any back, and where local stores were started again from what they saved then.
        """
        if status.state != "training":
            return
        manifest, placement = self.manifest, self.placement
        batches = [int(status.batches[str(lane)]) for lane in range(manifest.lanes)]
        stale = stale_shards(store, manifest.namespace, batches)
        gone = np.isin(placement.members, stale).sum(axis=1).max(initial=0) if stale else 0
        if gone > placement.r:
            raise RunError(self._broken_off(store, status, stale))

    def _broken_off(self, store: Store, status: Status, stale: Sequence[int]) -> str:
        first = self.manifest.stages[0].first_step
        anew = status.step < first
        of = "of no step, for it never stopped cleanly" if anew else f"of step {status.step}, where it last stopped cleanly"
        reported = self.reported_step()
        to = "" if reported is None else f" (steps up to {reported} were reported)"
        told = (
            f"run {self.path}: was broken off: its dense part is {of}, but rows on store shard {', '.join(map(str, stale))} are of later steps{to}, "
            "and the dense part of those is nowhere; "
        )
        local = LocalStores.find(self.path / STORES)
        running = [str(pid) for pid in local.pids if pid] if local is not None else []
        if not running:
            return (
                told
                + f"the rows stay where they are, in namespace {self.manifest.namespace}; --overwrite would delete them and train anew"
            )
        then = "begins again" if anew else f"goes on from step {status.step}, of which the rows are saved"
        return told + f"the rows are in servers that still run ({', '.join(running)}): once these are ended, --resume {then}"

    def reported_step(self) -> int | None:
        """The last training step that metrics.jsonl tells of; None if there is none."""
        try:
            with open(self.path / METRICS, "rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
                lines = file.read().split(b"\n")
        except OSError:
            return None
        for line in reversed(lines):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return int(json.loads(line)["step"])
        return None

    @property
    def placement(self) -> Placement:
        """Where the run's rows live."""
        return Placement.load(self.path / PLACEMENT)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(
                f"run {self.path}: cannot read {name} ({error}); restore the folder from a copy, or delete the run with --overwrite and train anew"
            ) from error
        if not isinstance(value, dict):
            raise RunError(
                f"run {self.path}: {name} is damaged; restore the folder from a copy, or delete the run with --overwrite and train anew"
            )
        return value


def check_free(path: Path, overwrite: bool) -> None:
    """Raise RunError if a new run cannot be put there."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RunError(f"--run: {path} is a file; choose a folder")
    held = {item.name for item in path.iterdir() if not _is_temporary(item.name)}
    foreign = sorted(held - set(_FILES))
    if foreign and not held & {MANIFEST, LOCK}:
        raise RunError(f"--run: {path} holds other files, such as {foreign[0]}; choose a new folder")
    # Without a status it never began to train, and there is nothing to lose.
    if STATUS in held and not overwrite:
        raise RunError(
            f"--run: {path} holds a run already; give --resume to go on with it, --overwrite to delete it, or another folder"
        )


def check_trainable(schedule: Schedule, job: TrainJob) -> None:
    """Raise RunError for a schedule of evaluation steps only, and for one that continues a run unless that is to be resumed."""
    header = schedule.header
    if not header.training_samples:
        raise RunError(
            f"schedule {schedule.path}: has evaluation steps only; evaluate a run on it: foreload evaluate RUN {schedule.path}"
        )
    if job.resume or header.parent is None:
        return
    run = Run(job.run)
    last = run.manifest.stages[-1] if (run.path / MANIFEST).exists() else None
    if last is not None and last.checksum == header.parent:
        raise RunError(
            f"schedule {schedule.path}: continues run {job.run}, which was trained on {last.path}; give --resume to go on with it"
        )
    parent = schedule.made_with("after") or "the schedule that it was prepared after"
    raise RunError(
        f"schedule {schedule.path}: continues the run that was trained on {parent}, not a new one; give that run's folder with --run, "
        "and --resume"
    )


def new_manifest(job: TrainJob, schedule: Schedule, store_urls: tuple[str, ...], local_stores: int | None) -> Manifest:
    """The manifest of a run that begins; store_urls without passwords."""
    return Manifest(
        run_id=secrets.token_hex(8),
        job=_saved(job, store_urls, local_stores),
        namespace=job.run_namespace,
        lanes=schedule.header.lanes,
        store_urls=() if local_stores else store_urls,
        local_stores=local_stores,
        stages=(Stage.of(schedule),),
    )


def _saved(job: TrainJob, store_urls: tuple[str, ...], local_stores: int | None) -> dict[str, Any]:
    stated = {name for name, setting in settings_of(TrainJob).items() if setting.stated}
    saved = {name: value for name, value in job.to_dict().items() if name in stated}
    if ":" in job.model:
        # Commands that read the run may be called elsewhere.
        saved["model_folder"] = os.path.abspath(job.model_folder)
    return saved | {"store": f"local:{local_stores}" if local_stores else ",".join(store_urls)}


def resumed_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a call with --resume, those of the run where nothing else is said. Raises SettingError and RunError."""
    if not values.get("run"):
        raise SettingError("--run: is missing; give the run that --resume goes on with")
    manifest = Run.open(values["run"]).manifest
    return manifest.job | {"schedule": manifest.stages[-1].path} | dict(values)


def resumed(run: Run, job: TrainJob, schedule: Schedule) -> tuple[Manifest, int]:
    """The manifest of a run that goes on, and the last step already trained.

    With the schedule that was being trained when it stopped, or with one prepared --after it. Raises RunError.
    """
    manifest, status = run.manifest, run.saved_status()
    before = manifest.training_job
    for name, setting in settings_of(TrainJob).items():
        of_numerics = name in NUMERICS_SETTINGS
        if name in FREE_SETTINGS or not setting.stated or (of_numerics and job.accept_numerics):
            continue
        if getattr(before, name) != getattr(job, name):
            was, now = before.to_dict()[name], job.to_dict()[name]
            remedy = "leave it out" + (", or add --accept-numerics" if of_numerics else "")
            raise RunError(f"{setting.flag}: must be what the run was started with, {was!r}; got {now!r}; {remedy}")
    if job.accept_numerics:
        manifest = replace(manifest, job=manifest.job | {name: getattr(job, name) for name in NUMERICS_SETTINGS})
    placement = run.placement
    if job.parity is not None and job.code(placement.shard_count) != (placement.k, placement.r):
        was = f"{placement.k}+{placement.r}" if placement.r else "off"
        raise RunError(f"--parity: must be what the run was started with, {was}; got {job.parity}; leave it out")
    if schedule.header.lanes != manifest.lanes:
        raise RunError(
            f"schedule {schedule.path}: has {schedule.header.lanes} lanes, the run {manifest.lanes}; prepare it with --after"
        )
    last, stage = manifest.stages[-1], Stage.of(schedule)
    if stage.identity == last.identity:
        if status.state == "ended":
            raise RunError(
                f"run {run.path}: is at the end of {schedule.path} already; prepare further data with `foreload prepare --after`, "
                "and give that schedule"
            )
        if schedule.complete:  # else trainers find out, who wait for it
            check_same(last, schedule)
        stage = replace(stage, segments=last.segments, prefix=last.prefix)
        return replace(manifest, stages=(*manifest.stages[:-1], stage)), status.step
    if stage.path == last.path:
        raise RunError(
            f"schedule {schedule.path}: is not the one that the run was trained on, but was prepared in its place since; prepare that one "
            "again, with the same data and options, or give one that was prepared --after it"
        )
    if schedule.header.parent is None or schedule.header.parent != last.checksum:
        raise RunError(
            f"schedule {schedule.path}: does not continue {last.path}, which the run was trained on; prepare it with --after that"
        )
    if status.state != "ended":
        raise RunError(
            f"run {run.path}: stopped after step {status.step}, before the end of {last.path}; --resume with that one first"
        )
    return replace(manifest, stages=(*manifest.stages, stage)), stage.first_step - 1


def check_same(stage: Stage, schedule: Schedule) -> None:
    """Raise RunError if a run was trained on other segments of a schedule than there are now, or will be; those are waited for."""
    if stage.identity == schedule.identity and stage.segments and schedule.prefix(stage.segments) != stage.prefix:
        raise RunError(
            f"schedule {schedule.path}: was prepared anew, and its first {stage.segments} segments are not those that the run was trained on; "
            "prepare it from the same data, with the same options"
        )


def open_stores(run: Run, status: Status) -> LocalStores | None:
    """The local stores of a run that rests at a status, to be started; None if it has none. Raises CacheError where rows are missing.

    Servers that still run, since they could not save or whoever started them was killed, are used as they are.
    """
    count = run.manifest.local_stores
    if count is None:
        return None
    stores = LocalStores(count, run.path / STORES, adopt=True)
    found = LocalStores.find(stores.directory)
    running = found.pids if found is not None else (None,) * count
    missing = [shard for shard in range(count) if not running[shard] and not (stores.directory / f"shard-{shard}.rdb").exists()]
    # A shard of which parity has the rows begins empty, and is noticed by that; so do all where none was ever written.
    if len(missing) > run.placement.r and any(status.batches.values()):
        raise CacheError(
            f"run {run.path}: the rows of local store shard {', '.join(map(str, missing))} after step {status.step} are nowhere: neither saved in "
            f"{stores.directory} nor in a server that runs; put the files back, or delete the run with --overwrite and train it anew"
        )
    return stores
