"""`foreload scrub`: reads every stripe of a run that rests, or that was broken off, checks its parity, and repairs what can be told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cache.batch_log import FileLog
from cache.local import LocalStores
from cache.reading import StoredRows
from cache.recovery import recover
from cache.scrub import Findings, TableRows, scrub_table
from cache.shards import Ownership
from cache.store import Store
from pipelines.replay import state_after
from pipelines.schedule import Schedule
from trainer.commands.resting import open_resting
from trainer.coordinator import ask
from trainer.errors import RunError
from trainer.job import TrainJob
from trainer.layout import layouts
from trainer.models import load_model
from trainer.run import LOG, STORES, Manifest, Run


def run(path: str, store: str | None) -> dict[str, Any]:
    """Scrub; returns {"stripes", "repaired", "damaged"}, the latter two lists of {"lane", "table", "stripe", "what"}.

    The write-back batch that a broken-off run died in is finished from its log first. Raises RunError and CacheError.
    """
    found = Run.open(path)
    if not found.placement.r:
        raise RunError(f"run {path}: has no parity, so there is nothing to check rows against; train with --parity")
    if ask(Path(path), {"do": "status"}) is not None:
        raise RunError(f"run {path}: is being trained; scrub it when it has stopped")
    status = found.status
    if status is None:
        raise RunError(f"run {path}: never began to train")
    if status.state == "training":
        with _broken_off(found, store) as (stored, schedule):
            return _scrub(stored, schedule, None)
    with open_resting(path, store) as resting:
        if resting.stored.lost:
            shards = ", ".join(map(str, sorted(resting.stored.lost)))
            raise RunError(f"run {path}: store shard {shards} is lost; --resume with a server there rebuilds it")
        return _scrub(resting.stored, resting.schedule, resting.status.step)


@contextlib.contextmanager
def _broken_off(found: Run, urls: str | None) -> Iterator[tuple[StoredRows, Schedule]]:
    """The rows of a run whose trainers died, every lane's last batch finished."""
    manifest = found.manifest
    job, schedule = manifest.training_job, Schedule(manifest.stages[-1].path)
    with Store(_urls(found, manifest, urls), job.store_silence) as store:
        stored = StoredRows(store, found.placement, _layouts(job, schedule), manifest.namespace)
        log = FileLog(found.path / LOG)
        for lane in range(manifest.lanes):
            recover(stored, lane, log, Ownership(0, manifest.identity))
        if stored.lost:
            raise RunError(
                f"run {found.path}: store shard {', '.join(map(str, sorted(stored.lost)))} is lost, and the run was broken off"
            )
        yield stored, schedule


def _urls(found: Run, manifest: Manifest, urls: str | None) -> list[str]:
    if manifest.local_stores is None:
        return urls.split(",") if urls else list(manifest.store_urls)
    local = LocalStores.find(found.path / STORES)
    if local is None:
        raise RunError(f"run {found.path}: was broken off, and its local stores are gone with their rows; train it anew")
    return list(local.urls)


def _layouts(job: TrainJob, schedule: Schedule) -> list[Any]:
    common, single = job.row_optimizers()
    return layouts(schedule.header.features, load_model(job.model), job.dim, common, single)


def _scrub(stored: StoredRows, schedule: Schedule, step: int | None) -> dict[str, Any]:
    names = [layout.name for layout in stored.layouts]
    total = Findings()
    for (lane, _), rows in sorted(_expected(schedule, step).items()):
        found = scrub_table(stored, lane, rows, repair=True)
        total.stripes += found.stripes
        total.repaired += found.repaired
        total.damaged += found.damaged

    def told(some: list[tuple[int, int, int, str]]) -> list[dict[str, Any]]:
        return [{"lane": lane, "table": names[table], "stripe": stripe, "what": what} for lane, table, stripe, what in some]

    return {"stripes": total.stripes, "repaired": told(total.repaired), "damaged": told(total.damaged)}


def _expected(schedule: Schedule, step: int | None) -> dict[tuple[int, int], TableRows]:
    """What each lane and table should hold after a step; None: it is not known which step was the last."""
    ended = step == schedule.header.end_step - 1
    ordinals = None if ended or step is None else [lane.ordinals for lane in state_after(schedule, step).lanes]
    parts: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for batch in schedule.rows():
        tags = np.zeros_like(batch["tag"]) if step is None else np.minimum(batch["tag"], step + 1)
        pairs = np.unique(batch["lane"].astype(np.int64) << 16 | batch["table"])
        for lane, table in ((int(pair) >> 16, int(pair) & 0xFFFF) for pair in pairs):
            chosen = (batch["lane"] == lane) & (batch["table"] == table)
            if ordinals is not None:
                chosen &= batch["ordinal"] < ordinals[lane][table]
            parts.setdefault((lane, table), []).append((batch["ordinal"][chosen], batch["id"][chosen], tags[chosen]))
    found = {}
    for (lane, table), some in parts.items():
        ordinal, ids, tags = (np.concatenate(column) for column in zip(*some, strict=True))
        order = np.argsort(ordinal)
        found[lane, table] = TableRows(table, ids[order], tags[order], ended)
    return found
