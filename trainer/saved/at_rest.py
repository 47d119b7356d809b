"""Work on the rows of a run that does not train, as the owner of all its lanes: moving them, and rebuilding store shards that lack theirs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import numpy as np

from foreload.base.codec import FormError, parse_json
from foreload.base.files import write_json
from foreload.cache.client.store import Store
from foreload.cache.parity.stripes import LaneStripes
from foreload.cache.protocol.ownership.batch_log import FileLog
from foreload.cache.protocol.ownership.ownership import Ownership, stale_shards, take_over
from foreload.cache.protocol.rounds.lanes import LanePlan
from foreload.cache.protocol.shards.namespace import claim
from foreload.cache.protocol.shards.reading import StoredRows
from foreload.cache.protocol.shards.shard_status import ServerUnreachable, ShardNews
from foreload.cache.traffic import Traffic
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.errors import RunError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_layouts import layouts_of
from foreload.trainer.run.directory import LOG, SUMMARY, Run
from foreload.trainer.run.event_log import EventLog, ShardRebuilt
from foreload.trainer.run.manifest import Manifest, Status
from foreload.trainer.run.resume import check_place, why_at_end
from foreload.trainer.run.servers import asked, open_stores, servers_of, with_named
from foreload.trainer.saved.expected_rows import given_ordinals
from foreload.trainer.saved.kept import schedule_of
from foreload.trainer.saved.row_check import check_rows
from foreload.trainer.saved.run_rows import own_rows
from foreload.trainer.saved.stopped_run import leave_stores, stopped_run_at

PATIENCE = timedelta(milliseconds=100)  # between two looks at how far the work is


@contextlib.contextmanager
def owned_at_rest(run: Run, store: Store, on_shards: Callable[[ShardNews], None] | None = None) -> Iterator[Traffic]:
    """Own all lanes of a run that stopped cleanly, in a further term, while entered; gives their traffic, which writes no rows of its own.

    on_shards: as Traffic has it. Raises RunError, CacheError.
    """
    manifest, placement, status, schedule = run.manifest, run.placement, run.saved_status(), schedule_of(run)
    given = given_ordinals(schedule, status.step)
    term = status.term + 1
    run.raise_term(term)
    stored = StoredRows(store, placement, layouts_of(manifest.training_job, schedule.header.features), manifest.namespace)
    stored.stripes = lambda lane: LaneStripes.of(placement, lane, given[lane])
    ownership = Ownership(term, manifest.identity)
    last = {lane: int(status.batches[str(lane)]) for lane in range(manifest.lanes)}
    take_over(stored, ownership, last)
    with (
        contextlib.closing(FileLog(run.path / LOG)) if placement.r else contextlib.nullcontext() as log,
        Traffic(stored, 0, log=log, ownership=ownership, on_shards=on_shards) as traffic,
    ):
        for lane, number in last.items():
            traffic.add_lane(LanePlan(lane, iter(()), number, status.step, np.array(given[lane], np.int64)))
        yield traffic


def rebuild_at_end(run: Run, job: TrainJob, schedule: Schedule, events: EventLog) -> bool:
    """Rebuild the store shards that lack rows of a run that has no step left to train, and say so; whether there were any.

    job: a call with --resume; if it asks for the digest, that is printed, and goes into the summary. Raises RunError where there is no server for
    one, and CacheError.
    """
    manifest, status = run.manifest, run.saved_status()
    why = why_at_end(manifest, status.state, status.step, job, schedule)
    if why is None or not run.placement.r:
        return False
    check_place(run, job)
    if not manifest.local_stores:
        manifest = with_named(manifest, run.placement, str(job.store))
    rebuilt, digest = _rebuild_lost(run, manifest, job, status)
    if rebuilt:
        for shard in rebuilt:
            sys.stderr.write(f"store shard {shard}: is whole again\n")
            events.note(ShardRebuilt(shard=shard))
        sys.stderr.write(f"run {run.path}: there is nothing to train; it {why}\n")
    if digest is not None:
        with contextlib.suppress(FileNotFoundError, FormError):
            summary = parse_json((run.path / SUMMARY).read_bytes())
            if isinstance(summary, dict):
                write_json(run.path / SUMMARY, summary | {"digest": digest})
        sys.stdout.write(f"digest {digest}\n")
    return bool(rebuilt)


def _rebuild_lost(run: Run, manifest: Manifest, job: TrainJob, status: Status) -> tuple[list[int], str | None]:
    """Rebuild the store shards that lack rows. Returns which these were, and the digest if there were any and the job asks for it.

    manifest: with the servers that the run is to have from now on.
    """
    placement, silence = run.placement, job.store_silence
    local = open_stores(run, status)
    whole, digest = False, None
    with contextlib.ExitStack() as stack:
        if local is not None:
            local.start()
            stack.callback(lambda: leave_stores(local, True, changed=whole))
        urls = local.urls if local is not None else servers_of(run, str(job.store))
        store = stack.enter_context(Store.connect(asked(urls), silence, placement.r))
        claim(store, manifest.namespace, manifest.identity, "resume", placement.r)
        own_rows(run, store, job.folder_moved)
        check_rows(run, store, status)
        batches = [int(status.batches[str(lane)]) for lane in range(manifest.lanes)]
        lost = sorted({*status.lost, *stale_shards(store, manifest.namespace, batches)} & {*placement.live})
        if not lost:
            return [], None
        run.write_manifest(manifest)
        sys.stderr.write(f"store shard {', '.join(map(str, lost))}: is rebuilt from parity\n")
        _rebuild(run, store, lost)
        whole = True
        if job.digest:
            with Store.connect(asked(urls), silence, placement.r) as whole_store:
                digest = stopped_run_at(run, whole_store, run.saved_status()).digest()
    return lost, digest


def _rebuild(run: Run, store: Store, lost: list[int]) -> None:
    without: dict[int, str] = {}  # shards whose server is not to be had, and why

    def note_unreachable(news: ShardNews) -> None:
        if isinstance(news, ServerUnreachable):
            without[news.shard] = news.why

    with owned_at_rest(run, store, note_unreachable) as traffic:
        while not traffic.shards.whole:
            if (shard := next(iter(without.keys() & {*traffic.shards.lost}), None)) is not None:
                raise RunError(
                    f"run {run.path}: store shard {shard} is lost, and there is no server for it ({without[shard]}); start that, empty, or name "
                    "another one in its place: --resume --store URL,..."
                )
            traffic.repair_shards(PATIENCE)
    status = run.saved_status()
    run.write_status(replace(status, lost=[shard for shard in status.lost if shard not in lost]))
