"""Rebuild the store shards that lack rows of a run with no step left to train."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from functools import partial

from foreload.base.codec import FormError, parse_json
from foreload.base.files import write_json
from foreload.cache.client.store import Store
from foreload.cache.protocol.ownership.ownership import stale_shards
from foreload.cache.protocol.shards.shard_status import ServerUnreachable, ShardNews
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.errors import RunError
from foreload.trainer.job.job import TrainJob
from foreload.trainer.run.directory import SUMMARY, Run
from foreload.trainer.run.event_log import EventLog, ShardRebuilt
from foreload.trainer.run.manifest import Manifest, Status
from foreload.trainer.run.resume import check_place, why_at_end
from foreload.trainer.run.servers import asked, with_named
from foreload.trainer.saved.run_rows import own_rows
from foreload.trainer.saved.stopped_run import stopped_run_at
from foreload.trainer.saved.stopped_stores import opened_rows, stopped_servers
from foreload.trainer.saved.stopped_traffic import PATIENCE, stopped_traffic


def rebuild_at_end(run: Run, job: TrainJob, schedule: Schedule, events: EventLog) -> bool:
    """Rebuild and report the shards that lack rows of a run with no step left to train.

    Args:
        job: A call with --resume. If it asks for the digest, that is printed and added to the
            summary.
        schedule: The schedule of the job.
        events: The run's event log.

    Returns:
        Whether any shard was rebuilt.

    Raises:
        RunError: There is no server for a shard.
        CacheError: A server fails.
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
    """Rebuild the store shards that lack rows.

    Args:
        manifest: With the servers that the run is to have from now on.
        job: As for `rebuild_at_end`.
        status: The run's status.

    Returns:
        The shards that were rebuilt, and the digest if there were any and the job asks for it.
    """
    placement, silence = run.placement, job.store_silence
    own = partial(own_rows, moved=job.folder_moved)
    with stopped_servers(run, status, str(job.store)) as servers:
        # `rebuild_at_end` has found the run stopped, so its servers have the rows of that stop.
        servers.of_the_stop = True
        with opened_rows(run, status, servers.urls, silence, placement.r, own) as store:
            stale = stale_shards(store, manifest.namespace, status.last_batches)
            lost = sorted({*status.lost, *stale} & {*placement.live})
            if not lost:
                return [], None
            run.write_manifest(manifest)
            sys.stderr.write(f"store shard {', '.join(map(str, lost))}: is rebuilt from parity\n")
            _rebuild(run, store, lost)
            servers.changed = True
            if not job.digest:
                return lost, None
            with Store.connect(asked(servers.urls), silence, placement.r) as whole_store:
                return lost, stopped_run_at(run, whole_store, run.saved_status()).digest()


def _rebuild(run: Run, store: Store, lost: list[int]) -> None:
    without: dict[int, str] = {}  # shards whose server cannot be reached, and why

    def note_unreachable(news: ShardNews) -> None:
        if isinstance(news, ServerUnreachable):
            without[news.shard] = news.why

    # A shard that is lost and whose server is known to be unreachable will not become whole: stop.
    with stopped_traffic(run, store, note_unreachable) as traffic:
        while not traffic.shards.whole:
            if (shard := next(iter(without.keys() & {*traffic.shards.lost}), None)) is not None:
                raise RunError(
                    f"run {run.path}: store shard {shard} is lost, and there is no server for it ({without[shard]}); start that, empty, or name "
                    "another one in its place: --resume --store URL,..."
                )
            traffic.repair_shards(PATIENCE)
    status = run.saved_status()
    run.write_status(replace(status, lost=[shard for shard in status.lost if shard not in lost]))
