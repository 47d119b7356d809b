"""`foreload scrub`: check every stripe of a run against its parity, and repair rows.

A row is repaired if the rest of its stripe determines it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from foreload.base.progress import progress_bar
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.protocol.ownership.recovery import recover
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.repair.findings import Findings
from foreload.cache.repair.scrub import scrub_table
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.cluster.messages.control import (
    Asks,
    AskScrub,
    AskScrubbed,
    Refused,
    RunStatus,
    ScrubProgress,
    ask,
    training_status,
)
from foreload.trainer.errors import RunError
from foreload.trainer.run.directory import SCRUB, STORES, Run, locked
from foreload.trainer.run.servers import asked, servers_of
from foreload.trainer.saved.kept import schedule_of
from foreload.trainer.saved.model_rows import given_ordinals, table_rows, write_expected_rows
from foreload.trainer.saved.run_rows import own_rows
from foreload.trainer.saved.stopped_run import open_stopped
from foreload.trainer.saved.stopped_stores import log_of, next_owner, stored_rows

POLL = timedelta(milliseconds=300)

_NAMED = 20  # stripes of each kind that the text names

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Stripe:
    """A stripe whose rows and parity did not match.

    Attributes:
        ordinals: the first and the last ordinal.
        shards: the shards with the wrong rows.
        what: the mismatch, in words.
    """

    lane: int
    table: str
    ordinals: tuple[int, int]
    shards: tuple[int, ...]
    what: str

    def text(self) -> str:
        """Return the stripe as one line."""
        first, last = self.ordinals
        shards = ", ".join(map(str, self.shards))
        return f"lane {self.lane}, table {self.table}, ordinals {first} to {last}, shards {shards}: {self.what}"


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """The result of a scrub.

    Attributes:
        stripes: the number of stripes read; likewise `rows` and `parity_rows`.
        repaired: the first of the `stripes_repaired` repaired stripes.
        damaged: the first of the `stripes_damaged` stripes that cannot be repaired.
        lost_shards: the shards that were not checked because they are lost.
    """

    stripes: int
    rows: int
    parity_rows: int
    stripes_repaired: int
    stripes_damaged: int
    repaired: tuple[Stripe, ...]
    damaged: tuple[Stripe, ...]
    lost_shards: tuple[int, ...]

    def text(self) -> str:
        """Return the result for the terminal."""
        lines = [
            f"{self.stripes:,} stripes, {self.rows:,} rows and {self.parity_rows:,} parity rows checked: "
            f"{self.stripes_repaired:,} stripes repaired, {self.stripes_damaged:,} damaged"
        ]
        if self.lost_shards:
            lines.append(f"not checked: store shard {', '.join(map(str, self.lost_shards))}, which is lost")
        kinds = ("repaired", self.repaired, self.stripes_repaired), ("damaged", self.damaged, self.stripes_damaged)
        for kind, stripes, count in kinds:
            lines += [f"{kind}: {stripe.text()}" for stripe in stripes[:_NAMED]]
            if count > _NAMED:
                lines.append(f"{kind}: {count - _NAMED:,} more; --json has the first 1,000")
        return "\n".join(lines)


def run(path: str, store: str | None, moved: bool = False) -> Scrubbed:
    """Scrub a run.

    If the run trains, its trainers scrub their lanes. If it crashed, the write-back batches during
    which it crashed are completed from the log first.

    Args:
        path: the folder of the run.
        store: the URLs of the run's servers. If None, the run's own.
        moved: whether the user states that the run's folder was moved.

    Raises:
        RunError: the run has no parity, or no rows, or its rows cannot be checked.
        CacheError: a server failed.
    """
    scrubbed_run = Run.open(path)
    if not scrubbed_run.placement.r:
        raise RunError(f"run {path}: has no parity, so there is nothing to check its rows against; train with --parity")
    training = training_status(scrubbed_run.path)
    if training is not None:
        return _beside_training(scrubbed_run, training)
    status = scrubbed_run.status
    if status is None:
        raise RunError(f"run {path}: never began to train, so it has no rows")
    local = LocalStores.find(scrubbed_run.path / STORES)
    # If the local servers of a crashed run ended too, only the rows of the last clean stop are
    # left, and the run is opened as a stopped one.
    if status.state == "training" and (scrubbed_run.manifest.local_stores is None or (local is not None and any(local.pids))):
        with locked(scrubbed_run.path), _crashed_run(scrubbed_run, store, moved) as (stored, schedule):
            return _scrub(stored, schedule, None, [None] * scrubbed_run.manifest.lanes)
    with open_stopped(path, store, own=partial(own_rows, moved=moved)) as saved:
        return _scrub(saved.stored, saved.schedule, saved.status.step, list(saved.status.last_batches))


@contextlib.contextmanager
def _crashed_run(scrubbed_run: Run, urls: str | None, moved: bool) -> Iterator[tuple[StoredRows, Schedule]]:
    """Yield the rows and the schedule of a run whose trainers crashed.

    The last batch of every lane is completed first.
    """
    manifest, schedule = scrubbed_run.manifest, schedule_of(scrubbed_run)
    silence, spared = manifest.training_job.store_silence, scrubbed_run.placement.r
    with Store.connect(asked(servers_of(scrubbed_run, urls)), silence, spared) as store, log_of(scrubbed_run) as log:
        own_rows(scrubbed_run, store, moved)
        stored = stored_rows(scrubbed_run, store, schedule)
        ownership = next_owner(scrubbed_run, scrubbed_run.saved_status().term)
        assert log is not None  # a run without parity is not scrubbed
        for lane in range(manifest.lanes):
            recover(stored, lane, log, ownership)
        if lost := sorted(stored.shards.lost):
            raise RunError(
                f"run {scrubbed_run.path}: crashed, and store shard {', '.join(map(str, lost))} is lost: it is not known which of its "
                "rows were ever written, so the stripes cannot be checked; if a server still has them, start it again and repeat the scrub"
            )
        yield stored, schedule


def _scrub(stored: StoredRows, schedule: Schedule, step: int | None, last_batches: list[int | None]) -> Scrubbed:
    ordinals = given_ordinals(schedule, step)
    stripes = int((-(-ordinals // stored.placement.k)).sum())
    total = Findings()
    with progress_bar(stripes, "stripe") as bar:
        for lane, rows in table_rows(schedule, step, ordinals):
            for findings in scrub_table(stored, lane, rows, last_batches[lane]):
                total.add(findings)
                bar.update(findings.stripes)
    return _scrubbed(total, [layout.name for layout in stored.layouts], sorted(stored.shards.lost))


def _beside_training(scrubbed_run: Run, training: RunStatus) -> Scrubbed:
    """Have the trainers scrub their lanes, and wait for the result.

    Args:
        training: the status of the run when the scrub began.
    """
    schedule = schedule_of(scrubbed_run)
    (scrubbed_run.path / SCRUB).mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=scrubbed_run.path / SCRUB))
    try:
        write_expected_rows(schedule, directory)
        _asked(scrubbed_run, AskScrub(directory.name))
        progress = ScrubProgress(False, 0, ())
        with progress_bar(0, "stripe") as bar:
            while not progress.done:
                time.sleep(POLL.total_seconds())
                progress = _asked(scrubbed_run, AskScrubbed())
                bar.total = progress.stripes
                bar.update(sum(part.findings.stripes for part in progress.trainers) - bar.n)
    finally:
        shutil.rmtree(directory)
        with contextlib.suppress(OSError):
            # The folder is not empty if another scrub is running.
            directory.parent.rmdir()
    total = Findings()
    for part in progress.trainers:
        total.add(part.findings)
    return _scrubbed(total, [table.name for table in schedule.header.features.tables], training.shards.not_whole)


def _asked(scrubbed_run: Run, request: Asks[_Answer]) -> _Answer:
    """Return the answer of a run that trains.

    Raises:
        RunError: the run does not answer, refuses, or no longer trains.
    """
    answer = ask(scrubbed_run.path, request)
    if answer is None:
        raise RunError(
            f"run {scrubbed_run.path}: stopped training before its scrub was reported as finished; scrub it again, now that it is stopped"
        )
    if isinstance(answer, Refused):
        raise RunError(f"run {scrubbed_run.path}: {answer.error}")
    return answer


def _scrubbed(total: Findings, tables: Sequence[str], lost: Iterable[int]) -> Scrubbed:
    repaired, damaged = (
        tuple(Stripe(one.lane, tables[one.table], (one.first, one.last), one.shards, one.what) for one in some)
        for some in (total.repaired, total.damaged)
    )
    counts = (total.stripes, total.rows, total.parity_rows, total.stripes_repaired, total.stripes_damaged)
    return Scrubbed(*counts, repaired, damaged, tuple(lost))
