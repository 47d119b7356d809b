"""A stopped run's servers and rows, and an owner of its lanes for commands that change rows.

Every command that works on a stopped run goes through this module. It opens the servers
(`stopped_servers`, `opened_rows`). Then it finds the rows as a reader (`find_stopped_rows`), or
owns the lanes in a further term (`next_owner`; with traffic, `stopped_traffic`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store
from foreload.cache.errors import StoreError
from foreload.cache.protocol.ownership.batch_log import BatchLog, FileLog
from foreload.cache.protocol.ownership.ownership import Ownership, find_rows, stale_shards
from foreload.cache.protocol.shards.namespace import claim
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.start import Start, written_stripes
from foreload.trainer.errors import RunRefused
from foreload.trainer.job.job import layouts_of
from foreload.trainer.run.directory import LOG, METRICS, STORES, Run
from foreload.trainer.run.manifest import Status
from foreload.trainer.run.report import reported_step
from foreload.trainer.run.servers import asked, open_stores, servers_of
from foreload.trainer.saved.model_rows import given_ordinals


def check_rows(run: Run, store: Store, status: Status) -> None:
    """Raise RunError unless the rows on an open store are those of the last clean stop.

    Trainers may have died since. The rows are still those of the stop if no trainer wrote any back,
    or if local stores were started again from what they saved then.
    """
    if status.state != "training":
        return
    manifest, placement = run.manifest, run.placement
    # A shard is stale if its markers are not those of the last clean stop. Parity makes up for at
    # most r stale shards in each stripe's group.
    stale = stale_shards(store, manifest.namespace, status.last_batches)
    gone = np.isin(placement.members, stale).sum(axis=1).max(initial=0) if stale else 0
    if gone > placement.r:
        raise RunRefused(_why_crashed(run, status, stale))


def _why_crashed(run: Run, status: Status, stale: Sequence[int]) -> str:
    first = run.manifest.stages[0].first_step
    anew = status.step < first
    of = "of no step, since it never stopped cleanly" if anew else f"of step {status.step}, where it last stopped cleanly"
    reported = reported_step(run.path / METRICS)
    to = "" if reported is None else f" (steps up to {reported} were reported)"
    message = (
        f"run {run.path}: crashed: its dense part is {of}, but rows on store shard {', '.join(map(str, stale))} are of later steps{to}, "
        "and the dense part of those steps was not saved; "
    )
    local = LocalStores.find(run.path / STORES)
    # Local stores have saved the rows of the last clean stop, which is better than an older
    # checkpoint.
    if (newest := run.newest_checkpoint(after=-1 if local is None else status.step)) is not None:
        return message + f"--resume goes on from checkpoint {newest}"
    running = [str(pid) for pid in local.pids if pid] if local is not None else []
    if not running:
        return (
            message
            + f"the rows stay where they are, in namespace {run.manifest.namespace}; --overwrite would delete them and train anew"
        )
    then = "begins again" if anew else f"goes on from step {status.step}, of which the rows are saved"
    return message + f"the rows are in servers that still run ({', '.join(running)}): once these are ended, --resume {then}"


@dataclass(slots=True)
class StoppedServers:
    """The servers of a stopped run.

    At the end, `of_the_stop` and `changed` decide whether local servers save their rows.

    Attributes:
        urls: The servers' URLs by number, with passwords.
        local: The run's own servers. None if it has none.
        of_the_stop: Whether the rows on the local servers are known to be those of the last clean
            stop.
        changed: Whether the command wrote to them.
    """

    urls: tuple[str, ...]
    local: LocalStores | None
    of_the_stop: bool = False
    changed: bool = False


@contextlib.contextmanager
def stopped_servers(run: Run, status: Status, given: str | None) -> Iterator[StoppedServers]:
    """Yield the servers of a stopped run; its local servers run until the context ends.

    Args:
        status: The run's status.
        given: URLs with passwords, in the order of the shards' numbers. If None, those that the run
            has noted.

    Raises:
        RunError: `given` has another number of servers than the run.
        CacheError: The local servers lack rows of `status`, or do not start.
    """
    local = open_stores(run, status)
    if local is None:
        yield StoppedServers(servers_of(run, given), None)
        return
    servers = StoppedServers(local.start().urls, local)
    try:
        yield servers
    finally:
        _leave(local, servers)


def _leave(local: LocalStores, servers: StoppedServers) -> None:
    """End the local servers when a command is done with them."""
    if not servers.of_the_stop:
        # The rows, even those of servers that were found running, may be of another step. They must
        # not replace what was saved.
        local.discard()
        return
    try:
        local.leave(servers.changed)
    except StoreError as error:
        if servers.changed:
            raise
        # The command has changed nothing, and servers that could not save are left as they were
        # found: so this is no more than a warning.
        sys.stderr.write(f"foreload: warning: {error}\n")


@contextlib.contextmanager
def opened_rows(
    run: Run,
    status: Status,
    urls: Sequence[str],
    silence: timedelta,
    spared: int = 0,
    own: Callable[[Run, Store], None] | None = None,
) -> Iterator[Store]:
    """Yield a store on a run's servers, once these are known to have the last clean stop's rows.

    Args:
        status: The run's status.
        urls: The servers' URLs by number, with passwords.
        silence: How long a server may be silent.
        spared: How many shards may be lost.
        own: Raises RunError unless the run's folder may do with the rows what the command does. If
            None, the caller checks that itself.

    Raises:
        RunError: The rows are not those of the last clean stop.
        CacheError: A server cannot be reached, or has another run's rows.
    """
    manifest = run.manifest
    with Store.connect(asked(urls), silence, spared) as store:
        # Another run may have taken the namespace since, with rows that look the same.
        claim(store, manifest.namespace, manifest.identity, "resume", spared)
        if own is not None:
            own(run, store)
        check_rows(run, store, status)
        yield store


def stored_rows(run: Run, store: Store, schedule: Schedule) -> StoredRows:
    """Return a run's rows on an open store, before anyone has checked which of them exist."""
    manifest = run.manifest
    layouts = layouts_of(manifest.training_job, schedule.header.features)
    return StoredRows(store, run.placement, layouts, manifest.namespace)


def find_stopped_rows(stored: StoredRows, schedule: Schedule, at: Start) -> None:
    """Find the rows of a stopped run for a reader, which owns no lane.

    Args:
        stored: The rows, as `stored_rows` returns them.
        schedule: The schedule that the run was trained on.
        at: Where the run stopped.

    Raises:
        StoreError: A store shard fails.
        RowsLost: More shards lack rows than parity covers.
    """
    stored.stripes = written_stripes(stored.placement, lambda: given_ordinals(schedule, at.step))
    find_rows(stored, at.last_batches)


def next_owner(run: Run, term: int) -> Ownership:
    """Return an owner of a run's lanes in the term after `term`.

    The run's folder notes that term before anyone owns lanes in it. Raises RunError and OSError.
    """
    run.raise_term(term + 1)
    return Ownership(term + 1, run.manifest.identity)


@contextlib.contextmanager
def log_of(run: Run) -> Iterator[BatchLog | None]:
    """Yield the log of a run's write-back batches; None without parity, where there is no log."""
    with contextlib.closing(FileLog(run.path / LOG)) if run.placement.r else contextlib.nullcontext() as log:
        yield log
