"""Own all lanes of a stopped run, for migrations, rebuilds and restores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import numpy as np

from foreload.cache.client.store import Store
from foreload.cache.protocol.ownership.batch_log import BatchLog
from foreload.cache.protocol.ownership.ownership import Ownership, take_over
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_status import ShardNews
from foreload.cache.traffic import Traffic
from foreload.trainer.assembly.start import written_stripes
from foreload.trainer.run.directory import Run
from foreload.trainer.saved.kept import schedule_of
from foreload.trainer.saved.model_rows import given_ordinals
from foreload.trainer.saved.stopped_stores import log_of, next_owner, stored_rows

PATIENCE = timedelta(milliseconds=100)  # between two checks of the progress


@contextlib.contextmanager
def owned_lanes(
    stored: StoredRows,
    ownership: Ownership,
    log: BatchLog | None,
    batches: Sequence[int],
    written: np.ndarray,
    step: int,
    on_shards: Callable[[ShardNews], None] | None = None,
) -> Iterator[Traffic]:
    """Own all lanes of a stopped run; yield their traffic, which fetches no rows.

    Args:
        stored: The run's rows on the store.
        ownership: The owner.
        log: The log of write-back batches. None without parity.
        batches: Of each lane, the number of its last write-back batch.
        written: int64 [lanes, tables]: all ordinals below these were written.
        step: The last step trained.
        on_shards: As for Traffic.

    Raises:
        CacheError: A server refuses the owner, or lacks rows that it must have.
    """
    stored.stripes = written_stripes(stored.placement, lambda: written)
    take_over(stored, ownership, dict(enumerate(batches)))
    with Traffic(stored, 0, log=log, ownership=ownership, on_shards=on_shards) as traffic:
        for lane, number in enumerate(batches):
            traffic.add_lane(LanePlan(lane, iter(()), number, step, written[lane]))
        yield traffic


@contextlib.contextmanager
def stopped_traffic(run: Run, store: Store, on_shards: Callable[[ShardNews], None] | None = None) -> Iterator[Traffic]:
    """Own all lanes of a run that stopped cleanly; yield their traffic, as `owned_lanes` does.

    The owner has a further term. Raises RunError and CacheError.
    """
    status, schedule = run.saved_status(), schedule_of(run)
    written = given_ordinals(schedule, status.step)
    ownership = next_owner(run, status.term)
    stored = stored_rows(run, store, schedule)
    with log_of(run) as log, owned_lanes(stored, ownership, log, status.last_batches, written, status.step, on_shards) as traffic:
        yield traffic
